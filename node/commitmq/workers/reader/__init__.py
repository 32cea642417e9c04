"""The readers: pulls, long polls and look-ups."""
