"""Transactions of a producer: half messages, their ends, and the node's questions about those without one."""
