"""The same training through every frontend, for the laws of frontends and `benchmarks.golden`."""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

STEPS = 12
DGC: dict[str, Any] = {"rampup_begin_step": 2, "sparsity": (0.75,), "min_numel": 64}
COMPRESSIONS: dict[str, Any] = {
    "none": None,
    "sparse": tw.Sparse(0.9),
    "quantized": tw.Quantized(1),
    "low rank": tw.LowRank(2, begin_step=2, min_numel=64),
}
COUNTED = ("bytes_sent", "bytes_received", "bytes_between_nodes", "bytes_between_stages", "wait_s")
NOT_COMPARED = ("random", "provenance", "traffic", *COUNTED)
"""Keys of a state on which no step depends."""
cross_entropy = nn.functional.cross_entropy


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


@dataclass(frozen=True)
class Case:
    """What is on; every frontend trains with the same."""

    lr: Any = 0.1
    clip: Any = None
    merge: int = 1
    nan_at: int | None = None
    """The microstep at which rank 1 has a loss that is not a number."""
    resume_at: int | None = None
    """The microstep before which all is made anew and goes on from its saved state."""
    wrap_at: int | None = None
    """The microstep before which torch's wrapper is another one."""
    compression: str = "none"
    """What local updates send of a change, by its name in `COMPRESSIONS`."""
    steps: int = STEPS
    dgc: dict[str, Any] = field(default_factory=dict)
    """Settings beside those of `DGC`."""
    group: dict[str, Any] = field(default_factory=dict)
    """Settings of the group of parameters of `DGCMomentum`."""
    made: Callable[[], nn.Module] = make_model
    ddp: dict[str, Any] = field(default_factory=dict)
    """Settings of torch's wrapper."""
    fields: dict[str, Any] | None = None
    """Of an engine, in place of `dgc` or `localsgd`."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """Of an engine, in place of SGD."""
    local: tw.LocalSGD | tw.AdaptiveLocalSGD | None = None
    """Of local updates, in place of an averaging in every third step."""
    frozen: str = ""
    alike: int = 1
    """Ranks beside each other that see the same data."""
    sharded: bool = False
    """By `fully_shard`: four ranks are two sites of two shards."""
    options: dict[str, Any] = field(default_factory=dict)
    """What each frontend takes: `digest_every`, say."""
    device: str = "cpu"


@dataclass(frozen=True)
class Trained:
    """What must be equal: the bits of all parameters, and the steps that were dropped."""

    bits: str
    held: str
    """The bits of all that the frontend saves, before the end."""
    dropped: int
    bytes_sent: int


def losses(case: Case, model: nn.Module, rank: int, begin: int, end: int) -> Iterator[Tensor]:
    """The loss of each microstep; its graph is made when it is asked for."""
    for x, y in batches(case, rank, begin, end):
        yield cross_entropy(model(x), y)


def batches(case: Case, rank: int, begin: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = rank // (2 if case.sharded else case.alike)
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(1000 * step + source)
        x = torch.randn(16, 8, generator=generator)
        if step == case.nan_at and rank == 1:
            x[0, 0] = float("nan")
        yield x.to(case.device), x[:, :4].nan_to_num().argmax(1).to(case.device)


def bits_of(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: own(value).clone() for name, value in model.state_dict().items()}


def hold(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        own(value).copy_(state[name])


class Frontend:
    """One way to train: made, stepped, saved and ended."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.made().to(case.device)
        if case.frozen:
            self.model.get_parameter(case.frozen).requires_grad_(False)
        self.options = dict(case.options)
        if case.sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model[2], mesh=mesh["shard"])
            fully_shard(self.model, mesh=mesh["shard"])
            self.options["mesh"] = mesh

    def train(self, rank: int, begin: int, end: int) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        raise NotImplementedError

    def load(self, state: Any) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Finish what is on its way."""

    def close(self) -> None:
        """Give up, where something has failed."""

    def wrap_again(self) -> None:
        """As a resumed run is wrapped anew by torch."""

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def kept(self) -> dict[str, Any]:
        """What this rank keeps of each parameter, by kind."""
        raise NotImplementedError


class OwnStep(Frontend):
    """`DGCMomentum.step`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.called: nn.Module = self.model
        self.optimizer = tw.optim.DGCMomentum(
            [{"params": list(self.model.named_parameters()), **case.group}],
            case.lr,
            grad_clip=case.clip,
            **{**DGC, **case.dgc, **self.options},
        )

    def train(self, rank: int, begin: int, end: int) -> None:
        merge = self.case.merge
        for step, loss in enumerate(losses(self.case, self.called, rank, begin, end), begin):
            (loss / merge).backward()  # type: ignore[no-untyped-call]
            if (step + 1) % merge == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def state(self) -> Any:
        return held(self.model), self.optimizer.state_dict()

    def load(self, state: Any) -> None:
        hold(self.model, state[0])
        self.optimizer.load_state_dict(state[1])

    def stats(self) -> dict[str, Any]:
        return self.optimizer.stats()

    def kept(self) -> dict[str, Any]:
        states = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        return {"residuals": {n: state.get("residual") for n, state in states.items()}}


class AttachedStep(OwnStep):
    """`DGCMomentum.attach`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._wrap()

    def _wrap(self) -> None:
        self.called = DistributedDataParallel(self.model, **self.case.ddp)
        self.handle = self.optimizer.attach(self.called)

    def wrap_again(self) -> None:
        self.handle.remove()
        self._wrap()

    def train(self, rank: int, begin: int, end: int) -> None:
        merge = self.case.merge
        for step, (x, y) in enumerate(batches(self.case, rank, begin, end), begin):
            if (step + 1) % merge:
                with self.called.no_sync():
                    (cross_entropy(self.called(x), y) / merge).backward()
                continue
            (cross_entropy(self.called(x), y) / merge).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self) -> None:
        self.handle.remove()


class WithEngine(Frontend):
    """`engine.train_step` with the fields of a subclass."""

    def fields(self) -> dict[str, Any]:
        return {"dgc": tw.DGC(**{**DGC, **self.case.dgc})}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        fields = self.fields() if case.fields is None else dict(case.fields)
        if case.merge > 1:
            fields["gradient_merge"] = tw.GradientMerge(case.merge)
        strategy = tw.DistributedStrategy(**fields)
        optimizer = (
            tw.optim.SGD(self.model.named_parameters(), case.lr, momentum=0.9, grad_clip=case.clip)
            if case.optimizer is None
            else case.optimizer(self.model.named_parameters())
        )
        self.engine = strategy.prepare(self.model, optimizer, cross_entropy, **self.options)

    def train(self, rank: int, begin: int, end: int) -> None:
        for x, y in batches(self.case, rank, begin, end):
            self.engine.train_step(x, y)

    def state(self) -> Any:
        return self.engine.state_dict()

    def load(self, state: Any) -> None:
        self.engine.load_state_dict(state)

    def end(self) -> None:
        self.engine.flush()
        self.engine.close()

    def close(self) -> None:
        self.engine.close()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def kept(self) -> dict[str, Any]:
        return self.state()["exchange"]  # type: ignore[no-any-return]


class Minimize(WithEngine):
    """`engine.minimize`."""

    def train(self, rank: int, begin: int, end: int) -> None:
        for loss in losses(self.case, self.model, rank, begin, end):
            self.engine.minimize(loss)


class Followed(WithEngine):
    """`engine.follow_steps`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.engine.follow_steps()

    def train(self, rank: int, begin: int, end: int) -> None:
        for loss in losses(self.case, self.model, rank, begin, end):
            loss.backward()  # type: ignore[no-untyped-call]
            self.engine.optimizer.step()
            self.engine.model.zero_grad()


class _Local(WithEngine):
    def fields(self) -> dict[str, Any]:
        config = _local(self.case)
        adaptive = isinstance(config, tw.AdaptiveLocalSGD)
        return {"adaptive_localsgd" if adaptive else "localsgd": config}


class LocalEngine(_Local):
    """`engine.train_step` with `localsgd`."""


class LocalMinimize(_Local, Minimize):
    """`engine.minimize` with `localsgd`."""


class LocalFollowed(_Local, Followed):
    """`engine.follow_steps` with `localsgd`."""


class LocalBlock(Frontend):
    """`local_sgd` around a loop."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer = tw.optim.SGD(
            self.model.named_parameters(), case.lr, momentum=0.9, grad_clip=case.clip
        )
        self.sync = tw.local_sgd(self.model, self.optimizer, _local(case), **self.options)
        self.sync.__enter__()

    def train(self, rank: int, begin: int, end: int) -> None:
        merge = self.case.merge
        for step, loss in enumerate(losses(self.case, self.model, rank, begin, end), begin):
            (loss / merge).backward()  # type: ignore[no-untyped-call]
            if isinstance(self.case.local, tw.AdaptiveLocalSGD):
                self.sync.observe(loss)
            if (step + 1) % merge == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def state(self) -> Any:
        return held(self.model), self.optimizer.state_dict(), self.sync.state_dict()

    def load(self, state: Any) -> None:
        hold(self.model, state[0])
        self.optimizer.load_state_dict(state[1])
        self.sync.load_state_dict(state[2])

    def end(self) -> None:
        self.sync.__exit__(None, None, None)

    def close(self) -> None:
        self.sync.close()

    def stats(self) -> dict[str, Any]:
        return {"dropped_steps": 0, **self.sync.stats()}

    def kept(self) -> dict[str, Any]:
        return self.sync.state_dict()


def _local(case: Case) -> tw.LocalSGD | tw.AdaptiveLocalSGD:
    return case.local or tw.LocalSGD(3, compression=COMPRESSIONS[case.compression])


GRADIENTS: tuple[type[Frontend], ...] = (OwnStep, AttachedStep, WithEngine, Minimize, Followed)
PARAMETERS: tuple[type[Frontend], ...] = (LocalBlock, LocalEngine, LocalMinimize, LocalFollowed)


def trained(rank: int, size: int, frontend: Callable[[Case], Frontend], case: Case) -> Trained:
    way, held = ended(rank, frontend, case)
    stats = way.stats()
    return Trained(bits_of(way.model), held, stats["dropped_steps"], int(stats["bytes_sent"]))


def ended(rank: int, frontend: Callable[[Case], Frontend], case: Case) -> tuple[Frontend, str]:
    """After all microsteps; or up to one, and from there by another object from the state of this.
    The text is the bits of its state before the end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was dropped|.*are equal")
        way = frontend(case)
        if case.resume_at is None:
            way.train(rank, 0, case.wrap_at or case.steps)
            if case.wrap_at is not None:
                way.wrap_again()
                way.train(rank, case.wrap_at, case.steps)
        else:
            way.train(rank, 0, case.resume_at)
            state = through_file(way.state())
            way.train(rank, case.resume_at, case.steps)  # what trains on does not change its state
            way.end()
            way = frontend(case)
            way.load(state)
            way.train(rank, case.resume_at, case.steps)
        held = bits_in(flat(way.state()))
        way.end()
    return way, held


def through_file(state: Any) -> Any:
    """Saved and loaded, by what torch reads without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat(tree: Any, place: str = "") -> dict[str, Any]:
    """All of a state that a later step depends on, by its place; tensors as their bytes."""
    if isinstance(tree, Tensor):
        raw = own(tree.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        return {place: raw.numpy().tobytes()}
    pairs: Any = ()
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    found = {
        key: value
        for at, entry in pairs
        if at not in NOT_COMPARED
        for key, value in flat(entry, f"{place}/{at}").items()
    }
    return found or {place: repr(tree)}


def bits_in(state: dict[str, Any]) -> str:
    return hashlib.blake2b(repr(sorted(state.items())).encode(), digest_size=8).hexdigest()
