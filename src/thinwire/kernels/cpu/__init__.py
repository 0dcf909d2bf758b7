"""Loops for the CPU, compiled by numba; imported by `kernels` only."""
