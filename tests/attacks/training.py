"""What the attacks train: a small model in any of the ways, with a place at which something is done
to one rank."""

import contextlib
import ctypes
import hashlib
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.attacks.outcome import Seen
from tests.members.places import TOKEN, meeting_place
from tests.members.relays import relay_place
from tests.waiting import PATIENCE_S

__all__ = [
    "MEMBER_WAYS",
    "WAYS",
    "Trainer",
    "batch",
    "digest",
    "make",
    "small_model",
    "under_attack",
]

WIDTH = 96
DGC = {"sparsity": (0.97,), "min_numel": 500}
MEMBER_WAYS = ("members", "relayed")
"""Sparse local updates of members with a token, which reach each other or go through a relay."""
WAYS = (
    *("dense", "adamw", "dgc", "adamw-dgc", "lamb", "attach", "alone", "local", "sparse-local"),
    *MEMBER_WAYS,
)


def small_model(*, norm: bool = True) -> nn.Module:
    """Some 20,000 parameters, and batch statistics; equal on all ranks."""
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(WIDTH)] if norm else []
    return nn.Sequential(
        nn.Linear(32, WIDTH),
        *middle,
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


class Trainer:
    """One way to train: `step(number)` makes one update; parameters and state by name."""

    def __init__(
        self,
        way: str,
        model: nn.Module,
        optimizer: Any,
        step: Callable[[int], None],
        engine: Any,
        sync: Any,
    ):
        self.way, self.model, self.optimizer, self.step, self.engine, self.sync = (
            way,
            model,
            optimizer,
            step,
            engine,
            sync,
        )
        self.ends = contextlib.ExitStack()
        """What ends with the training."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training depends on, the live ones, by kind and name."""
        names = {p: name for name, p in self.model.named_parameters()}
        found = {f"parameter {name}": p.detach() for p, name in names.items()}
        found |= {f"buffer {n}": b for n, b in self.model.named_buffers() if b.is_floating_point()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    found[f"{key} {names[param]}"] = value
        for name, residual in _residuals(self.engine).items():
            found[f"residual {name}"] = residual
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
        """Of all that an update changes, and of its count; buffers, which the forward pass changes,
        aside."""
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


def make(way: str, *, norm: bool = True, apart: bool = False, **options: Any) -> Trainer:
    """Everything up to the first step; `apart`: with models that have to be made equal first."""
    model, rank = small_model(norm=norm), dist.get_rank()
    if apart:
        with torch.no_grad():
            model[0].weight.add_(rank)
    loss_of = nn.functional.cross_entropy
    if way in ("attach", "alone"):
        optimizer: Any = tw.optim.DGCMomentum(
            model.named_parameters(), lr=0.05, momentum=0.9, **{**DGC, **options}
        )
        forward: nn.Module = model
        if way == "attach":
            forward = DistributedDataParallel(model)
            optimizer.attach(forward)

        def step(number: int) -> None:
            x, y = batch(number, rank)
            optimizer.zero_grad()
            loss_of(forward(x), y).backward()
            optimizer.step()

        return Trainer(way, model, optimizer, step, None, None)
    if way in ("local", "sparse-local", *MEMBER_WAYS):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compression = None if way == "local" else tw.Sparse(0.9)
        ends = contextlib.ExitStack()
        if way in MEMBER_WAYS:
            options["members"] = ends.enter_context(joined(relay=way == "relayed"))
        sync = tw.local_sgd(
            model,
            optimizer,
            tw.LocalSGD(k_steps=4, begin_step=1, compression=compression),
            **options,
        )
        sync.__enter__()
        if way in MEMBER_WAYS:
            ends.push(sync)

        def local_step(number: int) -> None:
            x, y = batch(number, rank)
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

        trainer = Trainer(way, model, optimizer, local_step, None, sync)
        trainer.ends = ends
        return trainer
    fields = {"dgc": tw.DGC(**DGC)} if "dgc" in way else {}
    fields |= {"lamb": tw.LAMB()} if way == "lamb" else {}
    if way in ("dense", "dgc"):
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    engine = tw.DistributedStrategy(**fields).prepare(model, optimizer, loss_of, **options)
    return Trainer(
        way,
        model,
        engine.optimizer,
        lambda number: engine.train_step(*batch(number, rank)),
        engine,
        None,
    )


@contextlib.contextmanager
def joined(*, relay: bool) -> Iterator[tw.Members]:
    """Yield the members of a run of all ranks; rank 0 is its host until all have left."""
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        place = relay_place() if relay else meeting_place()
        address = [ends.enter_context(place) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(address)
        token_file = Path(folder, "token")
        token_file.write_bytes(TOKEN)
        token_file.chmod(0o600)
        ends.callback(dist.barrier)
        options = {"min_members": 1, "start_members": dist.get_world_size(), "timeout": PATIENCE_S}
        with tw.join(
            address[0], run="attacked", token_file=token_file, relay=relay, **options
        ) as members:
            yield members


def under_attack(
    trainer: Trainer, attack: Callable[[], None] | None, *, at: int, last: int, **told: Any
) -> Seen:
    """Train to update `at`, do it, go on to update `last` or to the first error."""
    seen, ended = Seen(more=told), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number in range(last):
            if number == at and attack is not None:
                attack()
            seen.before, begin_s = trainer.digest(), time.monotonic()
            try:
                trainer.step(number)
            except Exception as error:  # judged by whoever attacked
                seen.seconds = time.monotonic() - begin_s
                seen.raised(error)
                ended = error
                break
            seen.updates = number + 1 - at
        else:
            if trainer.sync is not None:  # between two averagings each rank is on its own
                try:
                    trainer.sync.flush()
                except Exception as error:
                    seen.raised(error)
                    ended = error
    seen.after, seen.common = trainer.digest(), trainer.common()
    if trainer.sync is not None:
        seen.before = (
            seen.after
        )  # the step of this rank alone is made before the averaging that fails
    if seen.error:
        seen.updates = max(seen.updates, 0) + 1
    trainer.ends.__exit__(type(ended) if ended else None, ended, None)
    return seen


def flip_bit(tensor: Tensor, chance: random.Random) -> str:
    """Change one bit of one entry, in memory: torch does not hear of it; returns what was done."""
    assert tensor.is_contiguous() or tensor.t().is_contiguous(), "its memory has no holes"
    count = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_uint8 * count).from_address(tensor.data_ptr())
    byte, bit = chance.randrange(count), chance.randrange(8)
    memory[byte] ^= 1 << bit
    return f"bit {bit} of byte {byte}"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names and all bits."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _residuals(engine: Any) -> dict[str, Tensor]:
    """Those that an engine keeps beside an ordinary optimizer, the live ones."""
    if engine is None:
        return {}
    return dict(engine._parts.exchange.state_dict().get("residuals", {}))
