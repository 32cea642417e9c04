"""cleanup: deletes the oldest segments of the CommitLog."""
