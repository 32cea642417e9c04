"""Access to files: descriptors, mappings, space and durability, each with its failpoints."""
