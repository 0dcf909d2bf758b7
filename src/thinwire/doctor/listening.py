"""Who of this user's torch processes listens on all addresses, as far as Linux shows it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["listening_everywhere", "ports_in_use"]

_LISTEN = "0A"
_PROC = Path("/proc")
_LONGEST_COMMAND = 60


def listening_everywhere() -> tuple[str, ...]:
    """Processes that have torch loaded and listen on every address, such as "port 29500: pid 7
    (torchrun train.py)".
    """
    ports = {
        inode: port for address, port, state, inode in _sockets() if _open_to_all(address, state)
    }
    if not ports:
        return ()
    found = []
    for folder in _PROC.glob("[0-9]*"):
        try:
            found += _told(folder, ports)
        except OSError:  # it has ended meanwhile, or does not let itself be looked at
            continue
    return tuple(sorted(found))


def _told(folder: Path, ports: Mapping[str, int]) -> list[str]:
    if folder.stat().st_uid != os.getuid():
        return []
    links = {str(link.readlink()) for link in (folder / "fd").iterdir()}
    mine = sorted({port for inode, port in ports.items() if f"socket:[{inode}]" in links})
    if not mine or "libtorch" not in (folder / "maps").read_text():
        return []
    command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    said = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
    return [f"port {', '.join(map(str, mine))}: pid {folder.name} ({said})"]


def ports_in_use() -> int:
    """The number of TCP ports that some socket of this machine has."""
    return len({port for _, port, _, _ in _sockets()})


def _open_to_all(address: str, state: str) -> bool:
    return state == _LISTEN and not address.strip("0")


def _sockets() -> Iterator[tuple[str, int, str, str]]:
    """Local address and port, state and inode of every TCP socket."""
    for name in ("tcp", "tcp6"):
        path = _PROC / "net" / name
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                yield address, int(port, 16), words[3], words[9]
