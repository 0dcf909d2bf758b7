"""Machines that are made up."""

from dataclasses import replace
from typing import Any

from tests.api import Interface, Machine

__all__ = ["made_up"]

LOOPBACK = Interface("lo", 65536, True, ("127.0.0.1", "::1"))


def made_up(address: str = "10.0.0.1", **changes: Any) -> Machine:
    """A machine where nothing is wrong, with some of its attributes changed."""
    machine = Machine(
        host=f"host-{address.rpartition('.')[2]}",
        namespace=address,
        names=(address,),
        names_error="",
        interfaces=(LOOPBACK, Interface("eth0", 1500, True, (address,))),
        gloo=(address,),
        gloo_error="",
        route=address,
        cores=2,
        open_files=4096,
        ports=(32768, 60999),
        ports_used=100,
        environment={},
        versions={"thinwire": "1.0", "wire": "1", "torch": "2.13.0+cpu", "python": "3.11.7"},
        clock_kept=True,
        listeners=(),
        public=(),
        private=(),
        naming_s=0.001,
        congestion="bbr",
    )
    return replace(machine, **changes)
