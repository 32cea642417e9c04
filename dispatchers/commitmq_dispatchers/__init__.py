"""The built-in dispatchers; each uses only what a plugin's dispatcher could use."""
