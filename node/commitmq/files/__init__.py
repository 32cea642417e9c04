"""How files are touched: descriptors, mappings, space, durability, with the failpoints of each."""
