"""The mathematics of the methods: tensors in, tensors out. It knows no ranks, modules or
optimizers, and every package above it may import it.
"""
