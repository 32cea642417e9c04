"""What stands between clients and a process that listens: bounds for each connection, each client and the process.

:mod:`.router` is the socket, :mod:`.gate` ends connections that break a bound, :mod:`.connection` is what is known of one,
:mod:`.unsent` counts answers that nobody takes.
"""
