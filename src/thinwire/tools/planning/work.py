"""Model and step as an exchange sees them: assumed, or measured by a probe."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from thinwire._version import __version__
from thinwire.tools.planning.network import FRAMES, Network
from thinwire.tools.run.config import muon_seconds

Shape = tuple[int, ...]
_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a step; the backward pass computes twice as many products."""
_MUON_BATCH = 2**24
"""Numbers of equal matrices that Muon updates together on a GPU."""
_WIDTH, _OF_NUMEL, _BY_NUMEL = 768, 1.24e8, 0.37
"""Width of a transformer with so many parameters, and its growth with their number."""
_MOST_LAYERS = 128
_VOCABULARY, _MOST_EMBEDDED = 2**17, 3
"""Rows of embedding and output in all; they have at most this part of the parameters."""


def transformer(numel: int) -> tuple[Shape, ...]:
    """Return shapes like those of usual transformers: what is not in a layer, then the layers."""
    # Source: sizes of GPT-2 (124 M to 1.5 B), Llama 3 (1, 8, 70 and 405 B) and Qwen 2.5 (0.5 to
    # 72 B): widths are 0.8 to 1.4 times theirs, layers 0.6 to 1.7 times. A layer is 12 squares
    usual = round(_WIDTH * (numel / _OF_NUMEL) ** _BY_NUMEL)
    width = max(1, min(usual, isqrt(numel // 18)), isqrt(numel // (12 * _MOST_LAYERS)))
    body = numel - min(numel // _MOST_EMBEDDED, _VOCABULARY * width)
    layers = body // (12 * width**2)
    rows, over = divmod(numel - layers * 12 * width**2, width)
    layer = (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)
    return ((rows, width), *([(over,)] if over else []), *layers * layer)


def adapters(numel: int, whole: int) -> tuple[Shape, ...]:
    """Return shapes of LoRA's adapters of all matrices of a transformer, in all `numel` numbers."""
    sides = [shape for shape in transformer(whole) if len(shape) > 1]
    rank = numel // sum(map(sum, sides))
    shapes = [pair for rows, columns in sides for pair in ((rank, columns), (rows, rank)) if rank]
    over = numel - sum(map(prod, shapes))
    return (*([(over,)] if over else []), *shapes)


@dataclass(frozen=True)
class Workload:
    """Compute of one rank between two exchanges."""

    numel: int
    shapes: tuple[Shape, ...]
    step_s: float
    cuda: bool = False
    forward: float | None = None
    ready_s: Sequence[float] | None = None
    muon_s: float | None = None
    muon_numel: int = 0
    muon_largest: int = 0
    """Numbers of the largest matrix that Muon trains."""
    width: float = 4.0
    frozen: int = 0
    """Number of parameters that do not change."""

    @classmethod
    def assumed(cls, numel: int, whole: int, step_s: float, *, cuda: bool) -> Self:
        """Return the work of a transformer of `whole` parameters, of which `numel` change."""
        if frozen := whole - numel:  # AdamW trains adapters
            shapes = adapters(numel, whole)
            return cls(numel, shapes, step_s, cuda, frozen=frozen)
        shapes = transformer(numel)
        hidden = [shape for shape in shapes[1:] if len(shape) > 1]
        return cls(
            numel,
            shapes,
            step_s,
            cuda,
            muon_s=muon_seconds(hidden, cuda=cuda),
            muon_numel=sum(map(prod, hidden)),
            muon_largest=max(map(prod, hidden), default=0),
        )

    def resized(self, numel: int) -> Self:
        """Return the work if so many parameters change."""
        return self.assumed(numel, numel + self.frozen, self.step_s, cuda=self.cuda)

    def by(self, optimizer: str | None) -> "Workload":
        """Return the work with the optimizer of a strategy; None is the task's own."""
        if optimizer != "muon" or self.muon_s is None:
            return self
        return replace(self, step_s=self.step_s + self.muon_s)

    def sharded(self, ranks: int) -> "Workload":
        """Return the work of one of `ranks` that share the model; its step takes as long."""
        if ranks == 1:
            return self
        shapes = tuple((ceil(s[0] / ranks), *s[1:]) if s else () for s in self.shapes)
        numel = sum(map(prod, shapes))
        muon_s = None if self.muon_s is None else self.muon_s / ranks
        return replace(
            self,
            numel=numel,
            shapes=shapes,
            muon_numel=ceil(self.muon_numel / ranks),
            muon_s=muon_s,
            frozen=self.frozen // ranks,
        )

    def by_muon(self, optimizer: str | None) -> int:
        """Return the number of parameters that Muon trains; 0 with others."""
        return self.muon_numel if optimizer == "muon" else 0

    @property
    def muon_at_once(self) -> int:
        """Numbers of the matrices that Muon updates at a time."""
        batch = min(_MUON_BATCH, self.muon_numel) if self.cuda else 0
        return max(self.muon_largest, batch)

    def bytes_inside(self, optimizer: str | None, ranks: int) -> float:
        """Return the bytes that one of `ranks` that share the model sends the others in a step."""
        words = 3 * self.numel + 2 * self.by_muon(optimizer) / ranks
        return self.width * words * (ranks - 1) / ranks

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(map(prod, self.shapes))

    @property
    def forward_s(self) -> float:
        """Seconds until the backward pass begins."""
        return self.step_s * _FORWARD_SHARE if self.forward is None else self.forward

    def buckets(
        self, first_bytes: int, bucket_bytes: int
    ) -> Iterator[tuple[float, tuple[Shape, ...]]]:
        """Yield ready time and shapes of each bucket, last tensors first."""
        limit = first_bytes
        bucket = list[Shape]()
        nbytes = 0
        latest = 0.0
        backward = zip(reversed(self.shapes), reversed(self.numels), self._ready(), strict=True)
        for shape, numel, ready_s in backward:
            bucket.append(shape)
            nbytes += 4 * numel
            latest = max(latest, ready_s)
            if nbytes >= limit:
                yield latest, tuple(bucket)
                limit = bucket_bytes
                bucket = []
                nbytes = 0
        if bucket:
            yield latest, tuple(bucket)

    def _ready(self) -> Iterable[float]:
        """Return when each gradient is ready, last tensors first."""
        if self.ready_s is not None:
            return reversed(self.ready_s)
        begin = self.forward_s
        whole = sum(self.numels)
        done = accumulate(reversed(self.numels))
        return (begin + (self.step_s - begin) * numel / whole for numel in done)


FORMAT = 1
_SMALL_BYTES = 256


class Probe(NamedTuple):
    """Network between ranks, work of the slowest rank, name of the task, and stated loss."""

    network: Network
    work: Workload
    task: str | None
    loss: float

    @classmethod
    def read(cls, path: Path) -> "Probe":
        """Read a file of the command; raise ValueError if it is not one."""
        named = f"probe={str(path)!r}"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = f"cannot be read as JSON: {error}; give a file of thinwire probe"
            raise ValueError(f"{named} {problem}") from error
        if not isinstance(found, dict) or "format" not in found:
            raise ValueError(f"{named} is not a probe; give a file of thinwire probe")
        if found["format"] != FORMAT:
            raise ValueError(
                f"{named} has format {found['format']!r}, written by thinwire "
                f"{found.get('thinwire')}; thinwire {__version__} reads format {FORMAT}; run "
                "thinwire probe again"
            )
        if found.get("ranks") == 1:
            raise ValueError(
                f"{named} was measured with one rank, which has no network; start thinwire probe "
                "with as many ranks as will train"
            )
        try:
            work = work_of(found["compute"])
            return cls(_network(found), work, found["task"], found.get("loss", 0.0))
        except (LookupError, TypeError, ValueError) as error:
            problem = f"is incomplete, it lacks {error}; run thinwire probe again"
            raise ValueError(f"{named} {problem}") from error


def _network(found: Mapping[str, Any]) -> Network:
    ranks = found["ranks"]
    latency_s = max(pair["latency_s"] for pair in found["pairs"])
    rate = min(rank["bytes_s"] for rank in found["together"])
    small = [one for one in found["collectives"] if one["bytes"] == _SMALL_BYTES]
    waits_s = 4 * (ranks - 1) * latency_s
    call_s = max(0.0, small[0]["seconds"] - waits_s) if small else Network.call_s
    restarts = any(found["idle_restarts"])
    return Network(8 * rate / FRAMES, latency_s, ranks, call_s, restarts, _node(found))


def _node(found: Mapping[str, Any]) -> Network | None:
    """Return the network inside a machine if all have equal, consecutive ranks, more than one."""
    hosts = found["hosts"]
    node_size = hosts.count(hosts[0])
    alike = [host for host in dict.fromkeys(hosts) for _ in range(node_size)] == hosts
    if node_size in (1, len(hosts)) or not alike:
        return None
    inside = [pair for pair in found["pairs"] if len({hosts[rank] for rank in pair["ranks"]}) == 1]
    rates = [pair["bytes_s"] for pair in inside if pair["bytes_s"] is not None]
    latency_s = max(pair["latency_s"] for pair in inside)
    return Network(8 * min(rates) / FRAMES, latency_s, node_size) if rates else None


def work_of(found: Mapping[str, Any]) -> Workload:
    """Return the work of a rank from a measured step; see `thinwire.tools.run.compute`."""
    return Workload(
        found["parameters"],
        tuple(map(tuple, found["shapes"])),
        found["step_s"],
        found["device"] == "cuda",
        found["forward_s"],
        found["ready_s"],
        found["muon_s"],
        found["muon_parameters"],
        found.get("muon_largest", 0),
        found["gradient_bytes"] / found["parameters"],
    )
