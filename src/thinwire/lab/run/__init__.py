"""One strategy from the start of its workers to its result."""
