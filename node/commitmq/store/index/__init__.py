"""Index files: writing and reading them, and finding their shape and state from the folder."""
