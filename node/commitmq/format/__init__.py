"""The bytes of a store: one module a structure, no file and no process."""
