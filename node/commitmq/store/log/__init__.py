"""The CommitLog: appending, reading, splitting, expiring."""
