"""Bounds between clients and a listening process: for each connection, each client and the process.

:mod:`.router` is the socket, :mod:`.gate` ends connections that break a bound, :mod:`.connection` keeps the counts of
one connection, :class:`.router.UnsentAnswers` counts answers that clients do not read.
"""
