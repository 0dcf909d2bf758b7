"""A small model trained in any of the ways, and what one rank reports of it under a fault."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.toys import bits, descend, engine_of
from thinwire.errors import ThinwireError

__all__ = ["Seen", "Trainer", "digest", "make", "meet_again", "said_nothing_moved"]

WIDTH = 96
DGC = {"sparsity": (0.97,), "min_numel": 500}
SOURCES = {
    "dgc, nodes": {"node_size": 2, "exchange": "gather"},
    "dgc, split": {"node_size": 1, "exchange": "split"},
}


def small_model() -> nn.Module:
    """Some 20,000 parameters, and batch statistics; equal on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(32, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 8),
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A mini-batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 32, generator=generator)
    return x, x[:, :8].argmax(1)


@dataclass
class Seen:
    """What one rank reports of its run, in plain values; digests are of parameters and state."""

    error: str = ""
    """Class of the error that ended it, empty without one."""
    family: bool = False
    """Whether the error is one of the library's."""
    text: str = ""
    before: str = ""
    """Digest before the call that ended with the error."""
    after: str = ""
    common: str = ""
    """Digest of what must be equal on all ranks, at the end."""
    updates: int = 0
    seconds: float = 0.0
    """Of the call that ended with the error."""
    more: dict[str, Any] = field(default_factory=dict)

    def raised(self, error: BaseException) -> None:
        self.error, self.text = type(error).__name__, str(error)
        self.family = isinstance(error, ThinwireError)


def said_nothing_moved(text: str) -> bool:
    """Whether an error claims that parameters and state are as before."""
    claim = r"[Nn]othing (of this exchange )?(was|has been) applied|[Nn]othing (has )?changed"
    return re.search(claim, text) is not None


@dataclass
class Trainer:
    """One way to train: `step(number)` makes one update; parameters and state by name."""

    way: str
    model: nn.Module
    optimizer: Any
    step: Callable[[int], Any]
    engine: Any = None
    sync: Any = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training depends on, by kind and name."""
        names = {p: name for name, p in self.model.named_parameters()}
        found = {f"parameter {name}": p.detach() for p, name in names.items()}
        found |= {f"buffer {n}": b for n, b in self.model.named_buffers() if b.is_floating_point()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    found[f"{key} {names[param]}"] = value
        kept = {} if self.engine is None else self.engine.state_dict()["exchange"]
        found |= {f"residual {name}": value for name, value in kept.get("residuals", {}).items()}
        if self.sync is not None:
            assert self.sync._averager is not None, "inside its block"
            averaging = self.sync._averager.averaging
            for kind, tensors in (
                ("anchor", averaging.anchors),
                ("outer", averaging.momentum),
                ("error", averaging.errors),
            ):
                found |= {f"{kind} {name}": value for name, value in tensors.items()}
        return found

    def place(self) -> int:
        """Updates made."""
        if self.engine is not None:
            return int(self.engine.step)
        return int(self.sync.step if self.sync is not None else self.optimizer.position)

    def digest(self) -> str:
        """Of all that an update changes, and of its count; not of buffers."""
        tensors = {name: t for name, t in self.tensors().items() if not name.startswith("buffer ")}
        return digest(tensors) + f" at {self.place()}"

    def common(self) -> str:
        """Of what must be equal on all ranks."""
        own = (
            "residual ",
            "error ",
            *(("momentum_buffer ",) if self.way in ("dgc", "attach", "alone") else ()),
        )
        own += ("exp_avg", "momentum_buffer ") if self.sync is not None else ()
        own += ("buffer ",) if self.way in ("attach", "alone") else ()  # those are the user's there
        return digest({name: t for name, t in self.tensors().items() if not name.startswith(own)})


def meet_again(rank: int, size: int, port: int) -> None:
    """Another process group, over a store that rank 0 hosts at this port."""
    dist.barrier()
    dist.destroy_process_group()
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)


def make(way: str, **options: Any) -> Trainer:
    """Everything up to the first step."""
    model, rank = small_model(), dist.get_rank()
    loss_of = nn.functional.cross_entropy
    forward: nn.Module = DistributedDataParallel(model) if way == "attach" else model

    def step(number: int) -> None:
        x, y = batch(number, rank)
        descend(optimizer, loss_of(forward(x), y))

    if way in ("attach", "alone"):
        optimizer: Any = tw.optim.DGCMomentum(
            model.named_parameters(), lr=0.05, momentum=0.9, **{**DGC, **options}
        )
        if way == "attach":
            optimizer.attach(forward)
        return Trainer(way, model, optimizer, step)
    if way in ("local", "sparse-local"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = tw.LocalSGD(4, compression=None if way == "local" else tw.Sparse(0.9))
        sync = tw.local_sgd(model, optimizer, config, **options)
        sync.__enter__()
        return Trainer(way, model, optimizer, step, sync=sync)
    fields = {"dgc": tw.DGC(**DGC, **SOURCES.get(way, {}))} if "dgc" in way else {}
    fields |= {"lamb": tw.LAMB()} if way == "lamb" else {}
    if way in ("dense", "dgc"):
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    engine = engine_of(model, loss_of, optimizer=optimizer, options=options, **fields)
    step_of = lambda number: engine.train_step(*batch(number, rank))  # noqa: E731
    return Trainer(way, model, engine.optimizer, step_of, engine)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names and all bits."""
    return bits(tensors[name] for name in sorted(tensors)) + " ".join(sorted(tensors))
