"""The built-in dispatchers; each uses only the interfaces of a plugin's dispatcher."""
