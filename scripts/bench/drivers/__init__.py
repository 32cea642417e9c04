"""The clients that do the measured work: one process for each measurement, and so none of them knows of the others.

A driver gets one JSON object as its only argument and prints one as the last line of its standard output.
"""
