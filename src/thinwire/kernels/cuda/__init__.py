"""The loops for CUDA, compiled by Triton; `kernels` and `wire.device_message` import them."""
