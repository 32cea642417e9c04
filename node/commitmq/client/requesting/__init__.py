"""Requests and their replies: who waits for a reply, and who sends one."""
