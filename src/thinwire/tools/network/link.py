"""The link between workers as plain data: how many bits a second, how late, and what follows from
both.
"""

import re
from dataclasses import dataclass
from math import inf, isfinite
from typing import Self

_UNITS_BIT_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SLOWEST_BIT_S = 1e4
FASTEST_BIT_S = 3e10  # the kernel's rate field ends at 2**32 bytes a second
_LATEST_S = 5.0
_EXAMPLES = "write a number and a unit, such as 500kbit, 100mbit or 1gbit"


@dataclass(frozen=True)
class Link:
    """Limits of what one worker sends and receives over the emulated network.

    Attributes:
        rate_bit_s: Bits per second in each direction; None leaves the link unshaped.
        latency_s: One-way delay in seconds, added to every packet.
        emulated: False asks for the machine's own loopback, without any emulation.
    """

    rate_bit_s: float | None
    latency_s: float = 0.0
    emulated: bool = True

    @classmethod
    def parse(cls, text: str, latency: str = "0ms", *, at_most: float = FASTEST_BIT_S) -> Self:
        """Read a link as the command line writes it: a rate ("100mbit"), "none" (emulated, but as
        fast as the machine) or "loopback", and a one-way delay ("10ms").
        """
        word = text.strip().lower()
        latency_s = parse_latency(latency)
        if word == "loopback":
            if latency_s:
                raise ValueError(
                    f"latency={latency!r} cannot be added to the link 'loopback'; use 'none' or a "
                    "rate"
                )
            return cls(None, emulated=False)
        return cls(None if word == "none" else parse_rate(text, at_most), latency_s)

    def seconds(self, sent_bytes: float) -> float:
        """Seconds that `sent_bytes` take on this link at the full rate, without latency."""
        return 0.0 if self.rate_bit_s is None else 8 * sent_bytes / self.rate_bit_s

    def __str__(self) -> str:
        """The link as the command line writes it."""
        delay = f" + {self.latency_s * 1e3:g}ms" if self.latency_s else ""
        if not self.emulated:
            return "loopback"
        return self.rate_text + delay

    @property
    def rate_text(self) -> str:
        """The rate as the command line writes it."""
        return "none" if self.rate_bit_s is None else _rate_text(self.rate_bit_s)


def parse_rate(text: str, at_most: float = FASTEST_BIT_S) -> float:
    """Bits per second from text such as "100mbit", 10kbit at least."""
    rate = _number_with_unit(text, _UNITS_BIT_S)
    if rate is None:
        raise ValueError(f"link={text!r} is not a rate: {_EXAMPLES}, or none, or loopback")
    if not _SLOWEST_BIT_S <= rate <= at_most:
        raise ValueError(
            f"link={text!r} is out of range: a rate from 10kbit to {_rate_text(at_most)} is "
            f"allowed; {_EXAMPLES}"
        )
    return rate


def parse_latency(text: str) -> float:
    """Seconds from text such as "10ms", 5s at most."""
    delay = 0.0 if text.strip() == "0" else _number_with_unit(text, _UNITS_S)
    if delay is None:
        raise ValueError(
            f"latency={text!r} is not a delay: write a number and a unit, such as 500us, 10ms or "
            "0.1s"
        )
    if delay > _LATEST_S:
        raise ValueError(f"latency={text!r} is out of range: 0ms to 5s is allowed")
    return delay


def _number_with_unit(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        return None
    value = float(match[1]) * units[match[2]]
    return value if isfinite(value) else inf


def _rate_text(rate_bit_s: float) -> str:
    for unit, factor in reversed(_UNITS_BIT_S.items()):
        if rate_bit_s >= factor:
            return f"{rate_bit_s / factor:g}{unit}"
    return f"{rate_bit_s / 1e3:g}kbit"
