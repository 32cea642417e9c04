"""flush: makes the CommitLog durable."""
