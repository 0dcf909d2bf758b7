"""One rank's knowledge of its machine, sent to the other ranks as JSON."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from thinwire._version import __version__
from thinwire._watchdog import Late, within
from thinwire.comm.sockets import listeners
from thinwire.tools.doctor.interfaces import (
    LOOK_UP_S,
    PROXIES,
    Interface,
    interfaces,
    is_loopback,
    listening,
    ports_in_use,
    resolved,
    source_towards,
)
from thinwire.wire.message import WIRE_VERSION

_LOOKED_AT = re.compile(
    r"(GLOO|TP|NCCL)_SOCKET_IFNAME|GLOO_DEVICE_TRANSPORT|TORCH_GLOO_LAZY_INIT"
    r"|TORCH_DISTRIBUTED_DEBUG|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|OMP_NUM_THREADS"
    r"|(GLOO|TORCH|NCCL|THINWIRE)\w*TIMEOUT\w*"
)
_WHERE_IN_GLOO = re.compile(r"^\[enforce fail at [^]]*\] ([\w ]+[!=]= [\w ]+\. )?")
_LONGEST_NAMING_S = 1.0
_SETTINGS = Path("/proc/sys/net/ipv4")
_TIME_ERROR = 5  # answer of adjtimex(2) if nothing keeps the clock


def setting(name: str) -> str:
    """Return a setting of TCP in Linux; empty elsewhere."""
    file = _SETTINGS / name
    return file.read_text().strip() if file.exists() else ""


@dataclass(frozen=True)
class Machine:
    """One rank's machine."""

    host: str
    namespace: str
    names: list[str]
    names_error: str
    interfaces: list[Interface]
    gloo: list[str]
    gloo_error: str
    route: str
    cores: int
    open_files: int
    ports: list[int]
    ports_used: int
    environment: dict[str, str]
    versions: dict[str, str]
    clock_kept: bool | None
    listeners: list[str]
    public: list[str]
    private: list[str]
    naming_s: float
    congestion: str

    @classmethod
    def look(cls) -> Self:
        """Return the current state of this machine."""
        host = socket.gethostname()
        begun = time.monotonic()
        names, names_error = resolved(host)
        silent = time.monotonic() - begun >= LOOK_UP_S
        gloo, gloo_error = ([], names_error) if silent and not named_interfaces() else announced()
        everywhere, public, private = listening()
        towards = source_towards(os.environ.get("MASTER_ADDR", ""))
        return cls(
            host=host,
            namespace=_namespace(host),
            names=names,
            names_error=names_error,
            interfaces=interfaces(),
            gloo=gloo,
            gloo_error=gloo_error,
            route=source_towards() if is_loopback(towards) else towards,
            cores=len(os.sched_getaffinity(0)),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ports=[*map(int, setting("ip_local_port_range").split() or (0, 0))],
            ports_used=ports_in_use(),
            # a proxy's value may hold a password
            environment={k: v for k, v in sorted(os.environ.items()) if _LOOKED_AT.fullmatch(k)}
            | {k: "set" for k in sorted(os.environ) if k.upper() in PROXIES},
            versions=_versions(),
            clock_kept=follows_a_time_server(),
            listeners=everywhere,
            public=public,
            private=private,
            naming_s=_naming_s(gloo[0] if gloo else "127.0.0.1"),
            congestion=setting("tcp_congestion_control"),
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the machine that another rank reported; raise TypeError for another format."""
        held = [Interface(**entry) for entry in row.get("interfaces", ())]
        return cls(**{**row, "interfaces": held})

    @property
    def address(self) -> str:
        """Address for other ranks: the one that gloo announces, else the source of packets."""
        return self.gloo[0] if self.gloo else self.route

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of its interfaces."""
        return tuple(address for one in self.interfaces for address in one.addresses)

    def interface_of(self, address: str) -> Interface | None:
        """Return the interface that has an address."""
        return next((one for one in self.interfaces if address in one.addresses), None)


def _naming_s(address: str) -> float:
    # as torch asks for each connection of its store, for its log
    mapped = address if ":" in address else f"::ffff:{address}"
    begun = time.monotonic()
    with contextlib.suppress(Late, OSError):  # no name is an answer too
        within(
            _LONGEST_NAMING_S,
            lambda: socket.getnameinfo((mapped, 0, 0, 0), socket.NI_NUMERICSERV),
            name="thinwire-doctor",
        )
    return min(time.monotonic() - begun, _LONGEST_NAMING_S)


def _namespace(host: str) -> str:
    # containers share the kernel's boot, and machines of one image the host's name
    boot, stack = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if not boot.exists():
        return host
    return f"{boot.read_text().strip()} {stack.readlink()}"


def _versions() -> dict[str, str]:
    return {
        "thinwire": __version__,
        "wire": str(WIRE_VERSION),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def follows_a_time_server() -> bool | None:
    """Return True if a time service keeps this machine's clock; None if unknown."""
    unchanged = (ctypes.c_byte * 512)()  # a `struct timex` of zeros reads, and sets nothing
    answer = ctypes.CDLL(None).adjtimex(unchanged)
    return None if answer < 0 else answer != _TIME_ERROR


def named_interfaces() -> list[str]:
    """Return the interfaces in GLOO_SOCKET_IFNAME; empty if it is not set."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def announced() -> tuple[list[str], str]:
    """Return the addresses on which a temporary gloo group listens here, or why it does not."""
    before = listeners()
    gloo = dist.ProcessGroupGloo
    try:
        devices = [gloo.create_device(interface=name) for name in named_interfaces()]
        devices = devices or [gloo.create_default_device()]
    except RuntimeError as error:
        return [], " ".join(_WHERE_IN_GLOO.sub("", str(error)).split())
    found = [address for address, port in listeners() if (address, port) not in before]
    del devices
    return found, ""
