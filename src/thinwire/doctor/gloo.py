"""The addresses that gloo announces, from torch itself."""

import os
import socket
from pathlib import Path

import torch.distributed as dist

__all__ = ["announced_addresses", "named_interfaces"]


def named_interfaces() -> list[str]:
    """The interfaces that GLOO_SOCKET_IFNAME names; none where it is not set."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def announced_addresses() -> tuple[str, ...]:
    """The addresses on which a gloo group of this process listens, made by gloo for a moment.

    Linux shows them; elsewhere the result is empty.

    Raises:
        RuntimeError: With gloo's own words, such as those for an interface that is not there.
    """
    before = _listening()
    names = named_interfaces()
    gloo = dist.ProcessGroupGloo
    devices = (
        [gloo.create_device(interface=name) for name in names]
        if names
        else [gloo.create_default_device()]
    )
    found = [address for key, address in _listening().items() if key not in before]
    del devices
    return tuple(dict.fromkeys(found))


def _listening() -> dict[str, str]:
    """Address of every socket on which this process listens, by its name in /proc."""
    found = {}
    folder = Path("/proc/self/fd")
    for link in folder.iterdir() if folder.exists() else ():
        try:
            name, copy = str(link.readlink()), os.dup(int(link.name))
        except OSError:  # the one through which the folder is read is closed by now
            continue
        if not name.startswith("socket:"):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as held:
            internet = held.family in (socket.AF_INET, socket.AF_INET6)
            if internet and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[name] = str(held.getsockname()[0])
    return found
