"""One module a process. A worker's docstring says what it owns, reads and advances, its sockets and exit codes."""
