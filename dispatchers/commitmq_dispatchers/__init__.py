"""Built-in dispatchers; each uses only what a third party could use."""
