"""Where this user's torch processes listen for other machines, as far as Linux shows it."""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.tools.doctor.interfaces import is_loopback

__all__ = ["Listening", "listening", "ports_in_use", "program_of"]

_LISTEN = "0A"
_PROC = Path("/proc")


class Listening(NamedTuple):
    """Processes that have torch loaded and listen."""

    everywhere: tuple[str, ...]
    """On every address, such as "port 29500: pid 7 (torchrun train.py)"."""
    outward: tuple[str, ...]
    """On one that is not loopback, such as "10.0.0.1:29400: pid 7 (thinwire host ...)"."""


def listening() -> Listening:
    """The processes of this user, this one aside."""
    places = {
        inode: (_as_text(address), port)
        for address, port, state, inode in _sockets()
        if state == _LISTEN
    }
    found: list[tuple[str, int, str]] = []
    for folder in _PROC.glob("[0-9]*"):
        try:
            found += _of_process(folder, places)
        except OSError:  # it has ended meanwhile, or does not let itself be looked at
            continue
    everywhere: dict[str, set[int]] = {}
    outward = set()
    for address, port, who in found:
        if ipaddress.ip_address(address).is_unspecified:
            everywhere.setdefault(who, set()).add(port)
        elif not is_loopback(address):
            where = f"[{address}]" if ":" in address else address
            outward.add(f"{where}:{port}: {who}")
    return Listening(
        tuple(
            sorted(
                f"port {', '.join(map(str, sorted(ports)))}: {who}"
                for who, ports in everywhere.items()
            )
        ),
        tuple(sorted(outward)),
    )


def _of_process(folder: Path, places: Mapping[str, tuple[str, int]]) -> list[tuple[str, int, str]]:
    """Address, port and name of each place where a process of ours listens with torch."""
    if folder.stat().st_uid != os.getuid() or folder.name == str(os.getpid()):
        return []
    links = {str(link.readlink()) for link in (folder / "fd").iterdir()}
    mine = {place for inode, place in places.items() if f"socket:[{inode}]" in links}
    if not mine or "libtorch" not in (folder / "maps").read_text():
        return []
    said = program_of((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
    return [(*place, f"pid {folder.name} ({said})") for place in mine]


def program_of(command: Sequence[str]) -> str:
    """Program, and script or module, of a command line; the rest may be secret."""
    words = iter(command)
    program = next(words, "").partition(" ")[0]  # of some that name themselves, options follow
    told = Path(program).name
    if not told.startswith("python"):
        return told
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return f"{told} -m {next(words, '')}"
        elif word == "-c":
            return f"{told} -c"
        elif not word.startswith("-"):
            script = Path(word).name
            return f"{script} {next(words, '')}" if script == "thinwire" else f"{told} {script}"
    return told


def _as_text(address: str) -> str:
    """An address as /proc/net has it: words of 32 bits in the machine's order, in hexadecimal."""
    raw = bytes.fromhex(address)
    words = [int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed)


def ports_in_use() -> int:
    """The number of TCP ports that some socket of this machine has."""
    return len({port for _, port, _, _ in _sockets()})


def _sockets() -> Iterator[tuple[str, int, str, str]]:
    """Local address and port, state and inode of every TCP socket."""
    for name in ("tcp", "tcp6"):
        path = _PROC / "net" / name
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                yield address, int(port, 16), words[3], words[9]
