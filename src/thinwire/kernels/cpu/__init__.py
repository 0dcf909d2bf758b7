"""The loops for the CPU, compiled by numba; `kernels` alone imports them."""
