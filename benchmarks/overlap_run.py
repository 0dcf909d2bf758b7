"""Worker of `benchmarks.overlap`: interleaved contenders, with steps timed and buckets watched."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import Group
from thinwire.exchange.overlap import Overlap
from thinwire.optim import DGCMomentum
from thinwire.tools.run.launch import Events

DEFAULT_MB = 25
MIB = 2**20
LR = 1e-3  # small: what is learned does not matter, and nothing may overflow
WITHOUT = ", without digest"
"""Ends the name of an engine that compares nothing."""
UNTIMED = 4  # DDP cuts its buckets anew after the first step, engines send early from the third on


def build_model(width: int, blocks: int) -> nn.Module:
    """A transformer's blocks: 12 width^2 parameters and 13 width smaller ones in each."""
    torch.manual_seed(3)
    layer = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(blocks)
    ]
    return nn.Sequential(*layer)


@dataclass(slots=True)
class Bucket:
    """One collective on its way; times in seconds since the step began."""

    sent: float
    there: float | None = None


@dataclass(slots=True)
class Watch:
    """Events of one step."""

    begin: float = 0.0
    last_gradient: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.begin

    def restart(self) -> None:
        self.begin, self.buckets = time.perf_counter(), []

    def follow(self, future: Any) -> None:
        """Note when a collective has arrived."""
        bucket = Bucket(self.now())
        self.buckets.append(bucket)

        def arrived(_: Any) -> None:
            bucket.there = self.now()

        future.then(arrived)

    def hidden(self) -> list[tuple[float, float]]:
        """Per bucket the seconds on its way, and the part of them before the last gradient was
        there.
        """
        there = [(b.sent, b.there) for b in self.buckets if b.there is not None]
        return [(end - sent, max(0.0, min(end, self.last_gradient) - sent)) for sent, end in there]


@contextmanager
def watched_groups(watch: Watch) -> Iterator[None]:
    """Follow the messages and dense buckets of the library, agreements aside."""
    plain = Group._launched

    def launched(
        self: Group,
        launches: Sequence[Callable[..., dist.Work]],
        result: Any,
        action: str,
        held: Sequence[Tensor],
        **kind: Any,
    ) -> Any:
        def watching(launch: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
            def start(**how: Any) -> dist.Work:
                work = launch(**how)
                if "bucket" in action:
                    watch.follow(work.get_future())
                return work

            return start

        return plain(self, [watching(launch) for launch in launches], result, action, held, **kind)

    Group._launched = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Group._launched = plain  # type: ignore[method-assign]


class Contenders:
    """The task of a rank."""

    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        self.config, self.events = config, events
        self.watch = Watch()
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (config["rows"], config["length"], config["width"])
        self.x, self.y = (torch.randn(shape, generator=generator) for _ in range(2))
        self.steps: dict[str, Callable[[], object]] = {}
        self.choose: dict[str, Callable[[], None]] = {}
        """Prepare the rank; each contender is set up before its step."""
        self.engines: dict[str, Any] = {}

    def train(self) -> dict[str, Any]:
        """Milliseconds of every step, of the slower rank and of this one's processor, and the way
        of every bucket.
        """
        if self.config["digest"]:
            self._build_digests()
        else:
            self._build()
        times: dict[str, list[float]] = {name: [] for name in self.steps}
        busy: dict[str, list[float]] = {name: [] for name in self.steps}
        waits: dict[str, list[float]] = {name: [] for name in self.engines}
        ways: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in self.steps}
        with watched_groups(self.watch):
            for number in range(UNTIMED + self.config["repeats"]):
                for name in self.steps:
                    begin, waited = time.process_time(), self._waited(name)
                    seconds = self._step(name)
                    if number >= UNTIMED and name in waits:
                        waits[name].append(1e3 * (self._waited(name) - waited))
                    if number >= UNTIMED:
                        busy[name].append(1e3 * (time.process_time() - begin))
                        times[name].append(1e3 * seconds)
                        ways[name].append(
                            [(1e3 * way, 1e3 * hidden) for way, hidden in self.watch.hidden()]
                        )
                self.events.write("round", number=number)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, times)
        slower = {
            name: [max(t) for t in zip(*(row[name] for row in everybody), strict=True)]
            for name in times
        }
        params = sum(p.numel() for p in self._model().parameters())
        return {
            "milliseconds": slower,
            "cpu_milliseconds": busy,
            "waits": waits,
            "buckets": ways,
            "params": params,
        }

    def _waited(self, name: str) -> float:
        """Seconds for the wire, of an engine."""
        return float(self.engines[name].stats()["wait_s"]) if name in self.engines else 0.0

    def _step(self, name: str) -> float:
        if name in self.choose:
            self.choose[name]()
        dist.barrier()
        self.watch.restart()
        self.steps[name]()
        return self.watch.now()

    def _build(self) -> None:
        self._plain("bare", self._model())
        self._plain("DDP", DistributedDataParallel(self._model()))
        watched = DistributedDataParallel(self._model())
        watched.register_comm_hook(None, self._averaged)
        self._plain("DDP, watched", watched)
        for name, dgc in (("dense", None), ("DGC", tw.DGC())):
            self._engine(f"engine, {name}", tw.DistributedStrategy(dgc=dgc))
        model = self._model()
        self._own("DGCMomentum", model, DGCMomentum(model.named_parameters(), LR, 0.9))
        ddp = DistributedDataParallel(self._model())
        optimizer = DGCMomentum(ddp.module.named_parameters(), LR, 0.9)
        optimizer.attach(ddp)
        self._own("DDP, DGCMomentum attached", ddp, optimizer)

    def _build_digests(self) -> None:
        sgd, adamw = partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW
        for name, dgc, kind in (
            ("dense", None, sgd),
            ("dense, AdamW", None, adamw),
            ("DGC", tw.DGC(), sgd),
        ):
            for ending, every in (("", 64), (WITHOUT, 0)):
                model = self._model()
                optimizer = kind(model.named_parameters(), LR)
                engine = tw.DistributedStrategy(dgc=dgc).prepare(
                    model, optimizer, nn.functional.mse_loss, digest_every=every
                )
                self.engines[f"engine, {name}{ending}"] = engine
                self.steps[f"engine, {name}{ending}"] = partial(engine.train_step, self.x, self.y)

    def _model(self) -> nn.Module:
        return build_model(self.config["width"], self.config["blocks"])

    def _plain(self, name: str, model: nn.Module) -> None:
        self._own(name, model, torch.optim.SGD(model.parameters(), LR, momentum=0.9))

    def _own(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._watch_end(model)

        def step() -> None:
            nn.functional.mse_loss(model(self.x), self.y).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.steps[name] = step

    def _engine(self, name: str, strategy: tw.DistributedStrategy) -> None:
        model = self._model()
        optimizer = torch.optim.SGD(model.named_parameters(), LR, momentum=0.9)
        engine = strategy.prepare(model, optimizer, nn.functional.mse_loss)
        self._watch_end(model)
        steps: Any = engine._steps

        def cut(size_mb: int, *, early: bool = True) -> None:
            if steps.overlap is not None:
                steps.overlap.remove()
            steps.overlap = Overlap(steps.params, steps.exchange, bucket_bytes=size_mb * MIB)
            if not early:
                steps.overlap.remove()
                steps.overlap = None

        cuts = {f"{name}, {mb} MiB": partial(cut, mb) for mb in self.config["bucket_mb"]}
        cuts[f"{name}, after the backward pass"] = partial(cut, DEFAULT_MB, early=False)
        self.choose |= cuts
        self.steps |= {name: partial(engine.train_step, self.x, self.y) for name in cuts}

    def _watch_end(self, model: nn.Module) -> None:
        """The first layer's gradients are the last to come."""

        def noted(_: Tensor) -> None:
            self.watch.last_gradient = self.watch.now()

        inner = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(inner, nn.Sequential)
        for param in inner[0].parameters():
            param.register_post_accumulate_grad_hook(noted)

    def _averaged(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        future = work.get_future()
        self.watch.follow(future)
        return future.then(lambda done: done.value()[0])
