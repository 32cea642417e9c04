"""Measurements of a running node: functions that return dataclasses and print nothing.

They use the public clients as a program would, so they report a program's figures. ``commitmq bench`` shows the
results.
"""
