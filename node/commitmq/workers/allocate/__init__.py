"""allocate: creates CommitLog segments before the writer needs them."""
