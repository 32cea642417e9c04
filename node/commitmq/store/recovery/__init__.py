"""Recovery: prepares a store before the first process uses it, and records its cuts."""
