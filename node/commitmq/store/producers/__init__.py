"""What a store knows of its idempotent producers."""
