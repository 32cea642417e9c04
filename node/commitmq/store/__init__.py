"""Formats and algorithms of the store on disk: no process and no socket, usable alone by tests, tools and Spark."""
