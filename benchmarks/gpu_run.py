"""Each rank of `benchmarks.gpu`: `python -m benchmarks.gpu_run PART DEVICE`, with the variables of
torchrun. Rank 0 prints a line of JSON whenever it has a new row: all results so far.
"""

import hashlib
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.gaps import SIZES
from benchmarks.law import numel_of
from thinwire._devices import moved
from thinwire.core.feedback import commit_list_, propose_list, sum_sparse
from thinwire.kernels.rules import Fold
from thinwire.layout.message import VALUE_BITS, WHOLE_BITS, Layout, Slot, WholeLayout
from thinwire.tools.run.built_in import VOCABULARY, ByteTransformer, loss_of
from thinwire.tools.run.config import ModelSize
from thinwire.wire.message import pack, pack_whole, unpack, unpack_whole

Maker = Callable[[nn.Module], torch.optim.Optimizer]
Found = dict[str, Any]
CPU = torch.device("cpu")
EQUAL_STEPS, LOSS_TOLERANCE = 16, 0.02
WARM_UP_STEPS, TIMED_ROUNDS = 3, 4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return tw.optim.Muon(tw.optim.muon_groups(model), lr=0.01)


@dataclass(frozen=True)
class Method:
    """A strategy with the optimizer that it is for.

    Attributes:
        fields: Of `DistributedStrategy`.
        make: Makes the optimizer.
        interval: Steps from one exchange to the next.
    """

    fields: dict[str, Any]
    make: Maker = adamw
    interval: int = 1


def local(k_steps: int, compression: Any = None) -> dict[str, Any]:
    return {"localsgd": tw.LocalSGD(k_steps, compression=compression)}


METHODS = {
    "dense": Method({}),
    "dense, Muon": Method({}, muon),
    "merge": Method({"gradient_merge": tw.GradientMerge(2)}, interval=2),
    "bfloat16": Method({"amp": tw.AMP()}),
    "recompute": Method({"recompute": tw.Recompute(("blocks.0",))}),
    "lamb": Method({"lamb": tw.LAMB()}),
    "lars": Method({"lars": tw.LARS()}, sgd),
    "dgc": Method({"dgc": tw.DGC(sparsity=(0.99,), min_numel=256)}, sgd),
    "low rank": Method({"low_rank": tw.LowRank(2, begin_step=2, min_numel=256)}),
    "local": Method(local(4), interval=4),
    "local, 1 bit": Method(local(4, tw.Quantized(1)), interval=4),
    "local, sparse": Method(local(4, tw.Sparse(0.9)), interval=4),
    "local Muon, 1 bit": Method(local(4, tw.Quantized(1)), muon, interval=4),
    "adaptive": Method({"adaptive_localsgd": tw.AdaptiveLocalSGD(2)}, interval=4),
}
TIMED = {
    "dense": METHODS["dense"],
    "dense, Muon": METHODS["dense, Muon"],
    "dgc": Method({"dgc": tw.DGC()}, sgd),
    "low rank": Method({"low_rank": tw.LowRank(2, begin_step=2)}),
    "local Muon, 1 bit": Method(local(16, tw.Quantized(1)), muon, interval=16),
}


class Rank:
    """Where this rank computes, and on what."""

    def __init__(self, device: str, rank: int) -> None:
        self.device = torch.device(device)
        self.rank = rank
        self.on_gpu = self.device.type == "cuda"

    def model(self, size: ModelSize) -> nn.Module:
        """The transformer of `thinwire compare`, alike on all ranks."""
        torch.manual_seed(0)
        return ByteTransformer(size).to(self.device)

    def batch(self, size: ModelSize, rows: int, step: int) -> tuple[Tensor, Tensor]:
        """Sequences of bytes that can be predicted: each is the one before plus a constant."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        begin = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        pace = torch.randint(1, 4, (rows, 1), generator=generator)
        text = (begin + pace * torch.arange(size.context + 1)) % VOCABULARY
        text = text.to(self.device)
        return text[:, :-1], text[:, 1:]

    def half(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """The most memory that tensors took since `forget_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else None

    def forget_peak(self) -> None:
        """Begin to measure `peak_bytes`."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _engine(model: nn.Module, method: Method) -> AbstractContextManager[tw.Engine]:
    """An engine that is closed at the end of the block."""
    strategy = tw.DistributedStrategy(**method.fields)
    return closing(strategy.prepare(model, method.make(model), loss_of))


def kernels(on: Rank, *_: str) -> Iterator[Found]:
    """Whether the torch operations of this device give the bits of the CPU's kernels."""
    rows = list[Found]()
    for dtype, bits in itertools.product((torch.float32, torch.float64), VALUE_BITS):
        with patch.dict(os.environ, {"THINWIRE_KERNELS": "reference"}):
            here = _exchanged(on.device, dtype, bits)
        alike = here == _exchanged(torch.device("cpu"), dtype, bits)
        rows.append({"method": f"{bits} bits of {dtype}", "passed": alike})
        yield {"rows": rows}


def _exchanged(device: torch.device, dtype: torch.dtype, bits: int) -> list[bytes]:
    """Messages, what was read from them, and the state, of one tensor and two ranks."""
    numel, k, generator = 100_003, 1009, torch.Generator().manual_seed(0)
    layout, parts, found = Layout((Slot(numel, k),), bits), [], list[Tensor]()
    for step in range(2):
        g, v, u = torch.randn(3, numel, dtype=dtype, generator=generator).to(device)
        fold = Fold(g, v, u, 0.9, False)
        proposal = propose_list([fold], [k])[0]
        indices, values = moved(proposal[:2], CPU)
        message, sent = pack(layout, step, 0, [(indices, values)])
        parts += unpack(layout, message, step=step, bucket=0, source=0).parts
        commit_list_([fold], [(proposal.indices, sent[0].to(device))], [0])
        found += [message, v, u]
        if bits in WHOLE_BITS:
            whole = WholeLayout((numel,), bits)
            message = pack_whole(whole, step, 0, [g])
            codes = unpack_whole(whole, message, step=step, bucket=0, source=0)
            found += [message, codes[0].part(0, numel, device)]
    found += sum_sparse(parts, dtype)
    return [tensor.cpu().numpy().tobytes() for tensor in found]


def strategies(on: Rank, *_: str) -> Iterator[Found]:
    """Losses of every method on this device and on the CPU, and whether all ranks end alike."""
    size, rows = ModelSize(32, 2, context=16), list[Found]()
    places = {"cpu": Rank("cpu", on.rank), on.device.type: on}
    for name, method in METHODS.items():
        losses = {}
        for where in places.values():
            model = where.model(size)
            with _engine(model, method) as engine:
                for step in range(EQUAL_STEPS):
                    loss = engine.train_step(*where.batch(size, 8, step))
                engine.flush()
            mean = loss.detach().cpu().float()
            dist.all_reduce(mean)
            losses[where.device.type] = float(mean) / dist.get_world_size()
            alike = _alike(model)
        here, cpu = losses[on.device.type], losses["cpu"]
        near = abs(here - cpu) <= LOSS_TOLERANCE * cpu
        rows.append(
            {"method": name, "loss": here, "loss on the CPU": cpu, "passed": alike and near}
        )
        yield {"rows": rows}


def _alike(model: nn.Module) -> bool:
    digest = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        digest.update(param.detach().cpu().numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest.hexdigest())
    return len(set(found)) == 1


def steps(on: Rank, size_name: str, rows_text: str, *_: str) -> Iterator[Found]:
    """Seconds, exposed share and memory of a step of each method."""
    size, batch_rows = SIZES[size_name], int(rows_text)
    rows = [_ddp(on, size, batch_rows)]
    found: Found = {"rows": rows, "parameters": numel_of(size_name)}
    yield found
    for name, method in TIMED.items():
        rows.append(_timed_row(on, size, batch_rows, name, method))
        yield found


def _timed_row(
    on: Rank, size: ModelSize, batch_rows: int, name: str, method: Method
) -> dict[str, Any]:
    alone_s = _computing_s(on, size, batch_rows, method)
    on.forget_peak()
    model = on.model(size)
    with _engine(model, replace(method, fields={"amp": tw.AMP(), **method.fields})) as engine:
        step_s = _timed_s(
            on, lambda step: engine.train_step(*on.batch(size, batch_rows, step)), method
        )
        sent = engine.stats()["bytes_sent"]
    taken = max(WARM_UP_STEPS, method.interval) + TIMED_ROUNDS * _round(method)
    row = _row(f"thinwire {name}", step_s, alone_s, on.peak_bytes())
    return {**row, "bytes_sent": sent, "steps": taken}


def _round(method: Method) -> int:
    return max(method.interval, 2)


def _row(name: str, step_s: float, alone_s: float, peak: int | None) -> dict[str, Any]:
    exposed = max(0.0, 1 - alone_s / step_s)
    return {
        "method": name,
        "step_s": step_s,
        "computing_s": alone_s,
        "exposed": exposed,
        "peak_bytes": peak,
    }


def _timed_s(on: Rank, step: Callable[[int], object], method: Method) -> float:
    """Mean seconds of a step, over whole intervals: the median of `TIMED_ROUNDS`."""
    for index in range(max(WARM_UP_STEPS, method.interval)):
        step(index)
    rounds, length = [], _round(method)
    for number in range(TIMED_ROUNDS):
        on.wait()
        begin_s = time.perf_counter()
        for index in range(length):
            step(number * length + index)
        on.wait()
        rounds.append((time.perf_counter() - begin_s) / length)
    return median(rounds)


def _plain_step(
    on: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    with on.half():
        loss = loss_of(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _computing_s(on: Rank, size: ModelSize, rows: int, method: Method) -> float:
    """The same steps without any exchange; all ranks take them at once."""
    model = on.model(size)
    optimizer = method.make(model)
    dist.barrier()
    return _timed_s(
        on, lambda step: _plain_step(on, model, optimizer, on.batch(size, rows, step)), method
    )


def _ddp(on: Rank, size: ModelSize, rows: int) -> dict[str, Any]:
    alone_s = _computing_s(on, size, rows, METHODS["dense"])
    on.forget_peak()
    model = DistributedDataParallel(on.model(size))
    optimizer = adamw(model)
    step_s = _timed_s(
        on,
        lambda step: _plain_step(on, model, optimizer, on.batch(size, rows, step)),
        METHODS["dense"],
    )
    return _row("torch DDP", step_s, alone_s, on.peak_bytes())


def averaging(on: Rank, *sizes: str) -> Iterator[Found]:
    """An averaging of local Muon at one bit by part, beyond a step, with state here and there.

    Both ranks share the device. A size that does not fit into it ends the part.
    """
    rows = list[Found]()
    for name, home in itertools.product(sizes, (None, "cpu")):
        row: Found = {"averaging": name, "state on": home or on.device.type}
        rows.append(row)
        try:
            row |= _averaging(on, SIZES[name], home)
        except torch.OutOfMemoryError:
            row["averaging"] += " does not fit"
            yield {"rows": rows}
            return
        yield {"rows": rows}


def _averaging(on: Rank, size: ModelSize, home: str | None) -> Found:
    """The shortest of some averagings; the host's time is what is left of it."""
    on.forget_peak()
    model = on.model(size)
    config = tw.LocalSGD(2, begin_step=0, compression=tw.Quantized(1), state_device=home)
    fields = {"localsgd": config, "amp": tw.AMP()}
    batch = on.batch(size, 1, on.rank)
    found = list[Found]()
    with _engine(model, Method(fields, muon)) as engine:
        for _ in range(2):
            engine.train_step(*batch)
        for _ in range(TIMED_ROUNDS):
            plain, full = (_seconds(on, engine, batch) for _ in range(2))
            found.append({key: full[key] - plain[key] for key in full})
    best = min(found, key=lambda row: row["seconds"])
    best["host_s"] = best["seconds"] - best["device_s"] - best["wire_s"]
    return {**{key: round(best[key], 3) for key in best}, "peak_bytes": on.peak_bytes()}


def _seconds(on: Rank, engine: tw.Engine, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of one step: in all, of kernels and copies, of waiting for messages; waits for the device."""
    dist.barrier()
    on.wait()
    waited_s = engine.stats()["wait_s"]
    profiled = torch.autograd.profiler.profile(enabled=on.on_gpu, use_device="cuda")
    begin_s = time.perf_counter()
    with _watched(on) as seen, profiled as profile:
        engine.train_step(*batch)
        on.wait()
    seconds = time.perf_counter() - begin_s
    events = profile.key_averages() if on.on_gpu else ()
    device_us = sum(event.self_device_time_total for event in events)
    wire_s = engine.stats()["wait_s"] - waited_s
    counts = {"waits": len(seen), "device_s": device_us / 1e6, "wire_s": wire_s}
    return {"seconds": seconds, **counts}


def waits(on: Rank, *_: str) -> Iterator[Found]:
    """Where the host waits for the device in a step; compiled models, CUDA graphs, streams."""
    size, rows = ModelSize(32, 2, context=16), list[Found]()
    for name, method in METHODS.items():
        model = on.model(size)
        with _engine(model, method) as engine:
            for step in range(4):
                engine.train_step(*on.batch(size, 8, step))
            batches = [on.batch(size, 8, step) for step in range(4, 8)]
            counts = []
            for batch in batches:
                with _watched(on) as seen:
                    engine.train_step(*batch)
                counts.append(len(seen))
        rows.append({"method": name, "waits in four steps": counts})
        yield {"rows": rows}
    checks: dict[str, Callable[[Rank], str]] = {
        "Lamb": partial(_never_waits, make=lambda m: tw.optim.Lamb(m.parameters())),
        "Lars": partial(_never_waits, make=lambda m: tw.optim.Lars(m.parameters(), lr=0.1)),
        "torch.compile": _compiled,
        "CUDA graph": _graphed,
        "own stream": _streamed,
    }
    outcomes: dict[str, str] = {}
    for name, check in checks.items():
        outcomes[name] = check(on)
        yield {"rows": rows, "checks": outcomes}


class _watched:  # noqa: N801
    """The warnings of torch about calls that wait for the device; none on a CPU."""

    def __init__(self, on: Rank) -> None:
        self.on, self.seen = on, warnings.catch_warnings(record=True)

    def __enter__(self) -> list[Any]:
        seen = self.seen.__enter__()
        warnings.simplefilter("always")
        if self.on.on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        assert seen is not None
        return seen

    def __exit__(self, *_: object) -> None:
        if self.on.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self.seen.__exit__(None, None, None)


def _never_waits(on: Rank, make: Maker) -> str:
    size = ModelSize(32, 2, context=16)
    model = on.model(size)
    optimizer = make(model)
    x, y = on.batch(size, 8, 0)
    for step in range(2):
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
        with _watched(on) if step else nullcontext([]) as seen:
            optimizer.step()
    return "passed" if not seen else f"waits {len(seen)} times: {seen[0].message}"


def _losses(
    on: Rank, change: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
) -> list[float]:
    size = ModelSize(32, 2, context=16)
    model = on.model(size)
    forward = change(model)  # a graph is captured before the engine registers its hooks
    with _engine(model, Method(local(2))) as engine:
        found = []
        for step in range(6):
            x, y = on.batch(size, 8, step)
            loss = loss_of(forward(x), y)
            engine.minimize(loss)
            found.append(float(loss.detach()))
        engine.flush()
    return found


def _near(one: list[float], other: list[float]) -> str:
    far = max(abs(a - b) / b for a, b in zip(one, other, strict=True))
    return "passed" if far <= LOSS_TOLERANCE else f"losses are {far:.1%} apart"


def _compiled(on: Rank) -> str:
    backend = "inductor" if on.on_gpu else "aot_eager"
    return _near(_losses(on, lambda model: torch.compile(model, backend=backend)), _losses(on))


def _graphed(on: Rank) -> str:
    if not on.on_gpu:
        return "needs a GPU"
    size = ModelSize(32, 2, context=16)
    sample = on.batch(size, 8, 0)[:1]
    graphed = _losses(on, lambda model: torch.cuda.make_graphed_callables(model, sample))
    return _near(graphed, _losses(on))


def _streamed(on: Rank) -> str:
    if not on.on_gpu:
        return "needs a GPU"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        own = _losses(on)
    torch.cuda.current_stream().wait_stream(stream)
    return _near(own, _losses(on))


PARTS: dict[str, Callable[..., Iterator[Found]]] = {
    "kernels": kernels,
    "strategies": strategies,
    "steps": steps,
    "averaging": averaging,
    "waits": waits,
}


def main() -> None:
    part, device, *options = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    found: Found = {}
    try:
        for found in PARTS[part](Rank(device, rank), *options):
            if rank == 0:
                print(json.dumps(found), flush=True)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({**found, "ended": True}))


if __name__ == "__main__":
    main()
