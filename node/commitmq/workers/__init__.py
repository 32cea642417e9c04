"""The worker processes, one module each. A worker's docstring lists its owned files, reads, advances, sockets and exit
codes.
"""
