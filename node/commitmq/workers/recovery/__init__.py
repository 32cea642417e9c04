"""recovery: runs once, before all other workers."""
