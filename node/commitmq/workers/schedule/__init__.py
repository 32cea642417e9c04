"""The schedule process: delivers delayed messages when they are due."""
