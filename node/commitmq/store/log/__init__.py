"""The CommitLog: appending, reading, splitting and expiring it."""
