"""The worker processes, one module each; its docstring lists owned files, reads, advances, sockets and exit codes."""
