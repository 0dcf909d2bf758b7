"""What decides how a processor rounds, for ranks that must get the same bits from the same
numbers.
"""

import torch

from thinwire.kernels import body_name

__all__ = ["CURES", "arithmetic"]

_INSTRUCTIONS = "instruction set that torch uses on the CPU"
_DENORMALS = "numbers below the normal range"
_KERNELS = "body of the kernels"

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
}
"""What to do where ranks differ, for `require_agreement`."""


def arithmetic(device: torch.device, *, kernels: bool = False) -> dict[str, str]:
    """What ranks that train on devices like this one must have in common.

    Args:
        device: Of the parameters.
        kernels: Whether the bodies of the kernels do not give the same bits for what is to be
            computed.
    """
    facts = {}
    if device.type == "cpu":
        tiny = torch.full((64,), torch.finfo(torch.float32).tiny) * 0.5
        facts[_INSTRUCTIONS] = torch.backends.cpu.get_cpu_capability()
        facts[_DENORMALS] = "become zero" if not bool(tiny.any()) else "are kept"
    if kernels:
        facts[_KERNELS] = body_name(device)
    return facts
