"""Loops over raw bytes, compiled by numba, and nothing else: no files, no sockets, no policy.

Importing any module here loads numba (about 0.3 s); clients that send single messages and the CLI must not.
"""
