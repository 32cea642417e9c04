"""Built-in plugins: whatever rides on hooks and is not a dispatcher."""
