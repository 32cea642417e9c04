"""From a message to an acknowledgement."""
