"""What the dashboard shows and does, as typed functions and as JSON under ``/api/v1``."""
