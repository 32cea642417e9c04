"""The metadata files of a store: topics, groups and offsets."""
