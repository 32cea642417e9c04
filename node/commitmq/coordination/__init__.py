"""The coordinator's decisions, without its sockets: topics, consumer groups, group offsets and their journal.

Each module is usable alone: time, folders and limits come in as arguments, so tests run years of heartbeats in a
second.
"""
