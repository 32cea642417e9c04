"""What every worker process has in common."""
