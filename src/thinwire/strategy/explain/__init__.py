"""What a strategy does, in words: the order of a step, advice, what it means for a model."""
