"""The loops for the CPU, compiled by numba."""
