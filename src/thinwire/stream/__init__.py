"""A model that can be followed: versions of its weights, written and read."""
