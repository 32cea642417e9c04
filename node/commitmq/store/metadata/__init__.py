"""Topics, groups and offsets as the files of a store hold them."""
