"""Index files: writing, reading, and what a folder of them says about itself."""
