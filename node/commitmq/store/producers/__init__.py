"""The state of a store's idempotent producers."""
