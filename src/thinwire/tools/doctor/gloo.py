"""The addresses that gloo announces, from torch itself."""

import os

import torch.distributed as dist

from thinwire.comm.sockets import listeners

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
    before = listeners()
    names = named_interfaces()
    gloo = dist.ProcessGroupGloo
    devices = (
        [gloo.create_device(interface=name) for name in names]
        if names
        else [gloo.create_default_device()]
    )
    found = [address for one, (address, _) in listeners().items() if one not in before]
    del devices
    return tuple(dict.fromkeys(found))
