"""Work on the folder of a store that no node runs on: rebuild what is derived from the log."""
