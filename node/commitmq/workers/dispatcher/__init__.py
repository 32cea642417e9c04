"""The process of one dispatcher."""
