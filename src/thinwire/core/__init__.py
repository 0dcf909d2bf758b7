"""The mathematics of the methods: tensors in, tensors out.

Beside it what all packages ask of models: optimizers combined, shards, trees of state. It does not
depend on ranks. Every package above it may import it.
"""
