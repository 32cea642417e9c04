"""The reader processes: pulls, long polls and look-ups."""
