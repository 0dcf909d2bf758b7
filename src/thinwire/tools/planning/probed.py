"""What `thinwire probe` has measured, as a plan needs it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire._version import __version__
from thinwire.tools.planning.network import FRAMES, Network
from thinwire.tools.planning.work import Work

__all__ = ["FORMAT", "Probe", "work_of"]

FORMAT = 1
_SMALL_BYTES = 256


@dataclass(frozen=True)
class Probe:
    """The network between ranks and the step of a model.

    Attributes:
        network: With the largest latency of a pair, and the rate of the slowest rank while all
            send.
        work: Of the slowest rank.
        task: Whose step it is, "FILE.py:NAME"; None for the model that comes with the command.
    """

    network: Network
    work: Work
    task: str | None

    @classmethod
    def read(cls, path: Path) -> "Probe":
        """Read the file that the command has written.

        Raises:
            ValueError: It is no probe, one of another version, or of a single rank.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"probe={str(path)!r} cannot be read: {error.strerror or error}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"probe={str(path)!r} is not JSON: {error}; give the file of thinwire probe"
            ) from error
        if not isinstance(found, dict) or "format" not in found:
            raise ValueError(f"probe={str(path)!r} is no probe: give the file of thinwire probe")
        if found["format"] != FORMAT:
            raise ValueError(
                f"probe={str(path)!r} has format {found['format']!r}, written by thinwire "
                f"{found.get('thinwire')}; thinwire {__version__} reads format {FORMAT}: probe "
                "again"
            )
        if found.get("ranks") == 1:
            raise ValueError(
                f"probe={str(path)!r} was measured with one rank, which has no network: start "
                "thinwire probe with as many ranks as will train"
            )
        try:
            return cls(_network(found), work_of(found["compute"]), found["task"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"probe={str(path)!r} is not whole, it lacks {error}: probe again"
            ) from error


def _network(found: Mapping[str, Any]) -> Network:
    ranks = found["ranks"]
    latency_s = max(pair["latency_s"] for pair in found["pairs"])
    rate = min(rank["bytes_s"] for rank in found["together"])
    small = [
        one["seconds"]
        for one in found["collectives"]
        if (one["kind"], one["bytes"]) == ("all_reduce", _SMALL_BYTES)
    ]
    call_s = max(0.0, small[0] - 4 * (ranks - 1) * latency_s) if small else Network.call_s
    restarts = any(found["idle_restarts"])
    return Network(8 * rate / FRAMES, latency_s, ranks, call_s, restarts, _node(found))


def _node(found: Mapping[str, Any]) -> Network | None:
    """Where all machines have as many ranks, more than one, side by side."""
    hosts = found["hosts"]
    node_size = hosts.count(hosts[0])
    alike = [host for host in dict.fromkeys(hosts) for _ in range(node_size)] == hosts
    if node_size in (1, len(hosts)) or not alike:
        return None
    inside = [pair for pair in found["pairs"] if len({hosts[rank] for rank in pair["ranks"]}) == 1]
    rates = [pair["bytes_s"] for pair in inside if pair["bytes_s"] is not None]
    latency_s = max(pair["latency_s"] for pair in inside)
    return Network(8 * min(rates) / FRAMES, latency_s, node_size) if rates else None


def work_of(found: Mapping[str, Any]) -> Work:
    """What a rank computes, from a measured step; see `thinwire.tools.run.compute`."""
    shapes = tuple(tuple(shape) for shape in found["shapes"])
    return Work(
        found["parameters"],
        shapes,
        found["step_s"],
        found["device"] == "cuda",
        found["forward_s"],
        tuple(found["ready_s"]),
        found["muon_s"],
        found["muon_parameters"],
        found["gradient_bytes"] / found["parameters"],
    )
