"""Code that every worker process uses."""
