"""Measurements of a running node: one module each, functions that return dataclasses and print nothing.

They use the public clients as a program would, so they report a program's figures. ``commitmq bench`` shows the
results; :mod:`commitmq.bench.goals` has the goals.
"""
