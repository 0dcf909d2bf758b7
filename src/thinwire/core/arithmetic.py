"""What decides how a processor rounds, for ranks that must get the same bits from the same
numbers.
"""

import torch
from torch import Tensor

from thinwire.kernels import body_name

__all__ = ["CURES", "arithmetic", "products_are_exact"]

_INSTRUCTIONS = "instruction set that torch uses on the CPU"
_DENORMALS = "numbers below the normal range"
_KERNELS = "body of the kernels"
_PRODUCTS = "how products of matrices are computed"

CURES = {
    _INSTRUCTIONS: (
        "Their results differ in the last bit, so replicas would part. Set ATEN_CPU_CAPABILITY to "
        "the lesser of the two (avx2, or default for none) in the environment of all ranks before "
        "they start"
    ),
    _DENORMALS: "Call torch.set_flush_denormal alike on all ranks before this",
    _KERNELS: (
        "LAMB and LARS round differently in them. Install numba on all ranks, or set "
        "THINWIRE_KERNELS=reference in the environment of all of them"
    ),
    _PRODUCTS: (
        "The last bits of Muon's update depend on it, so replicas would part. Set OMP_NUM_THREADS, "
        "or call torch.set_num_threads, and torch.set_float32_matmul_precision, alike on all ranks"
    ),
}
"""What to do where ranks differ, for `require_agreement`."""


def arithmetic(
    device: torch.device, *, kernels: bool = False, products: bool = False
) -> dict[str, str]:
    """What ranks that train on devices like this one must have in common.

    Args:
        device: Of the parameters.
        kernels: Whether the bodies of the kernels do not give the same bits for what is to be
            computed.
        products: Whether updates that all ranks make alike have products of matrices in them.
    """
    facts = {}
    if device.type == "cpu":
        least = torch.finfo(torch.float32).tiny
        tiny = torch.full((64,), least, dtype=torch.float32, device="cpu") * 0.5
        facts[_INSTRUCTIONS] = torch.backends.cpu.get_cpu_capability()
        facts[_DENORMALS] = "become zero" if not bool(tiny.any()) else "are kept"
    if kernels:
        facts[_KERNELS] = body_name(device)
    if products:
        threads = f"{torch.get_num_threads()} threads, " if device.type == "cpu" else ""
        facts[_PRODUCTS] = f"{threads}float32 as {_precision(device)}"
    return facts


def products_are_exact(like: Tensor) -> bool:
    """Whether products of matrices like this are computed in its type, and not with fewer bits."""
    return like.dtype == torch.float64 or (
        like.dtype == torch.float32 and _precision(like.device) == "ieee"
    )


def _precision(device: torch.device) -> str:
    """In which float32 matrices are multiplied, as torch calls it."""
    if device.type not in ("cpu", "cuda"):
        return "unknown"
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = str(backend.matmul.fp32_precision)
    return "ieee" if precision == "none" else precision
