"""Facts that decide how a processor rounds.

Ranks that must compute equal bits from equal numbers compare them.
"""

import torch
from torch import Tensor

from thinwire.kernels import body_name

_INSTRUCTIONS = "instruction set that torch uses on the CPU"
_DENORMALS = "numbers below the normal range"
_KERNELS = "body of the kernels"
_PRODUCTS = "how products of matrices are computed"

CURES = {
    _INSTRUCTIONS: (
        "Their results differ in the last bit, so replicas would diverge. Set ATEN_CPU_CAPABILITY "
        "to the lower of the two (avx2, or default for none) in the environment of all ranks "
        "before they start"
    ),
    _DENORMALS: "Call torch.set_flush_denormal with the same value on all ranks first",
    _KERNELS: (
        "LAMB and LARS round differently in the two. Install numba on all ranks, or set "
        "THINWIRE_KERNELS=reference in the environment of all of them"
    ),
    _PRODUCTS: (
        "The last bits of Muon's update depend on it, so replicas would diverge. Set "
        "OMP_NUM_THREADS (or call torch.set_num_threads) and torch.set_float32_matmul_precision "
        "to the same values on all ranks"
    ),
}
"""Remedies where ranks differ, for `require_agreement`."""


def arithmetic(
    device: torch.device,
    *,
    elementwise: bool = False,
    kernels: bool = False,
    products: bool = False,
) -> dict[str, str]:
    """Return the facts that ranks must share if they train on devices like this one.

    `elementwise`: ranks compute alike only sums, products and quotients of two numbers, as in
    averagings: all processors round these alike, but for numbers below the normal range. `kernels`:
    the bodies differ in bits for the work to come. `products`: updates contain matrix products.

    >>> sorted(arithmetic(torch.device("cuda")))
    []
    """
    facts = {}
    on_cpu = device.type == "cpu"
    if elementwise or on_cpu:
        least = torch.finfo(torch.float32).tiny
        tiny = torch.full((64,), least, dtype=torch.float32, device=device) * 0.5
        facts[_DENORMALS] = "become zero" if not bool(tiny.any()) else "are kept"
    if on_cpu and not elementwise:
        facts[_INSTRUCTIONS] = torch.backends.cpu.get_cpu_capability()
    if kernels:
        facts[_KERNELS] = body_name(device)
    if products:
        threads = f"{torch.get_num_threads()} threads, " if on_cpu else ""
        facts[_PRODUCTS] = f"{threads}float32 as {_precision(device)}"
    return facts


def products_are_exact(like: Tensor) -> bool:
    """Return True if products of such matrices are computed in full precision of their type."""
    return like.dtype == torch.float64 or (
        like.dtype == torch.float32 and _precision(like.device) == "ieee"
    )


def _precision(device: torch.device) -> str:
    """Return the precision of float32 matrix products, by its name in torch."""
    if device.type not in ("cpu", "cuda"):
        return "unknown"
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = str(backend.matmul.fp32_precision)
    return "ieee" if precision == "none" else precision
