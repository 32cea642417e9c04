"""The pop process: the consumers of a group share queues."""
