"""The process that hosts one dispatcher."""
