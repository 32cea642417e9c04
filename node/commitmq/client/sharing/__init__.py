"""The consumer that shares queues with the others of its group."""
