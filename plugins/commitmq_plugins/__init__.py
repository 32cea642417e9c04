"""Built-in plugins: the parts that use hooks and are not dispatchers."""
