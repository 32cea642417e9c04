"""allocate: makes CommitLog segments before the writer needs them."""
