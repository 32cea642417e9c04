"""The writer: the only process that appends to the CommitLog."""
