"""Measurements of a running node: one module each, functions that return dataclasses and print nothing.

They use the public clients as a program would, so what they report is what a program gets. ``commitmq bench`` shows the
results; :mod:`commitmq.bench.goals` knows what they should be.
"""
