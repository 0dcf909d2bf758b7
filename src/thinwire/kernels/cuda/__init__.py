"""The loops for CUDA, compiled by Triton."""
