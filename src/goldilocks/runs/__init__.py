"""A run on disk: one writer and one reader of each thing in it."""
