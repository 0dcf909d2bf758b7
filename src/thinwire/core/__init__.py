"""The mathematics of the methods: tensors in, tensors out; nothing here knows ranks, modules or
optimizers.
"""
