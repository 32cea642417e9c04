"""Producers with several nodes: which node gets a message, and where a message goes that its node did not store."""
