"""The kernel's counters of an interface."""

from pathlib import Path

__all__ = ["interface_bytes"]


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes (sent, received) by an interface of the calling thread's network namespace, headers
    included.

    Raises:
        RuntimeError: There is no such interface.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"the interface {interface!r} is not in this network namespace")
