"""Whether the kernel knows that its clock follows another one; nothing is sent."""

import ctypes
import sys

__all__ = ["follows_a_time_server"]

_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)


class _Timex(ctypes.Structure):
    """The head of `struct timex`, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 400),
    )


def follows_a_time_server() -> bool | None:
    """Whether a time service keeps this machine's clock; None where that cannot be seen."""
    if sys.platform != "linux":
        return None
    state = _Timex(modes=0)  # reads, and sets nothing
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        return None
    return not state.status & _UNSYNCHRONIZED
