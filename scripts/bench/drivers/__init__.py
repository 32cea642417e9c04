"""The clients that do the measured work. Each measurement has a process of its own, so it is independent of the others.

A driver gets one JSON object as its only argument and prints one as the last line of its standard output.
"""
