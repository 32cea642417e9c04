"""What happens to a store before the first process uses it, and what it leaves to tell of it."""
