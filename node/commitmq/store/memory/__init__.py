"""Memory topics: their files in shared memory."""
