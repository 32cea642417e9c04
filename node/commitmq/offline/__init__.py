"""Offline verbs: work on the folder of a store without a running node, such as verify, repair, expire and rebuild."""
