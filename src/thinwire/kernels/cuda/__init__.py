"""Loops for CUDA, compiled by Triton; imported by `kernels` and `wire.device_message`."""
