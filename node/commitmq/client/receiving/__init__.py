"""From a position to messages, and back to a committed offset."""
