"""The mathematics of the methods: tensors in, tensors out.

It does not depend on ranks, modules or optimizers. Every package above it may import it.
"""
