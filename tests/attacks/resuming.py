"""Attacks c, h and i: parameters in another order, odd and damaged checkpoints, damaged caches of
kernels."""

import inspect
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from tests.attacks.outcome import GRACE_S, Attack, Outcome, Seen, judged
from tests.attacks.training import digest
from tests.ranks import Pool

__all__ = ["ATTACKS"]

TIMEOUT_S = 8.0


def alike() -> nn.Module:
    """Layers of one shape, so that no shape gives an exchange of two of them away."""
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def prepared(way: str, model: nn.Module, params: list[Any]) -> Any:
    kind = torch.optim.AdamW if way == "adamw" else torch.optim.SGD
    options = {} if way == "adamw" else {"momentum": 0.9}
    fields = {"dgc": tw.DGC(sparsity=(0.9,), min_numel=100)} if way == "dgc" else {}
    if way == "localsgd":
        fields = {"localsgd": tw.LocalSGD(k_steps=3)}
    return tw.DistributedStrategy(**fields).prepare(model, kind(params, lr=0.01, **options))


def train(engine: Any, first: int, last: int) -> None:
    rank = dist.get_rank()
    for step in range(first, last):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.minimize((engine.model(x) - x.roll(1, 1)).square().mean())


def by_name(engine: Any) -> dict[str, Tensor]:
    """Optimizer state and residuals by the names of the model."""
    names = {p: n for n, p in engine.model.named_parameters()}
    found = {f"p {n}": p.detach().clone() for p, n in names.items()}
    for param, state in engine.optimizer.state.items():
        found |= {
            f"{k} {names[param]}": v.clone()
            for k, v in state.items()
            if isinstance(v, Tensor) and v.dim()
        }
    return found


def reordered(rank: int, size: int, way: str, named: bool, folder: str, seed: int) -> Seen:
    chance = random.Random(seed)
    model = alike()
    params: list[Any] = list(model.named_parameters()) if named else list(model.parameters())
    engine = prepared(way, model, params)
    train(engine, 0, 3 + chance.randrange(5))
    saved = by_name(engine)
    engine.save(folder)
    engine.close()
    other = alike()
    params = list(other.named_parameters()) if named else list(other.parameters())
    chance.shuffle(params)
    seen = Seen()
    try:
        engine = prepared(way, other, params)
        engine.load(folder)
        loaded = by_name(engine)
        right = loaded.keys() == saved.keys() and all(
            torch.equal(loaded[k], v) for k, v in saved.items()
        )
        seen.common = "right" if right else f"mixed up on rank {rank}"
        engine.close()
    except Exception as error:
        seen.raised(error)
    return seen


def order(way: str, *, named: bool) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            args = (way, named, folder, seed)
            answers = pool.run(
                reordered, *args, timeout_s=60, group_timeout_s=TIMEOUT_S, expect_errors=True
            )
        return judged(answers, expected=("ValueError",))

    return make_it


def own_state(rank: int, size: int, named: bool, seed: int) -> Seen:
    """DGCMomentum's own state_dict, loaded into one whose parameters come in another order."""
    chance = random.Random(seed)

    def made(shuffle: bool) -> tuple[nn.Module, Any]:
        model = alike()
        params: list[Any] = list(model.named_parameters()) if named else list(model.parameters())
        if shuffle:
            chance.shuffle(params)
        return model, tw.optim.DGCMomentum(params, lr=0.01, sparsity=(0.9,), min_numel=100)

    def states(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        names = {p: n for n, p in model.named_parameters()}
        return {
            f"{k} {names[p]}": v.clone()
            for p, s in optimizer.state.items()
            for k, v in s.items()
            if isinstance(v, Tensor)
        }

    model, optimizer = made(shuffle=False)
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    saved = states(model, optimizer)
    other, loading = made(shuffle=True)
    seen = Seen()
    try:
        loading.load_state_dict(optimizer.state_dict())
        loaded = states(other, loading)
        right = loaded.keys() == saved.keys() and all(
            torch.equal(loaded[k], v) for k, v in saved.items()
        )
        seen.common = "right" if right else f"mixed up on rank {rank}"
    except Exception as error:
        seen.raised(error)
    return seen


def own_order(*, named: bool) -> Callable[[Pool, int], Outcome]:
    return lambda pool, seed: judged(
        pool.run(
            own_state, named, seed, timeout_s=60, group_timeout_s=TIMEOUT_S, expect_errors=True
        ),
        expected=("ValueError",),
    )


def folders(directory: str) -> list[Path]:
    return sorted(
        p
        for p in Path(directory).iterdir()
        if p.name.startswith("step_") and p.is_dir() and not p.is_symlink()
    )


def saved_states(rank: int, size: int, what: str, directory: str, seed: int) -> Seen:
    chance = random.Random(seed)
    model = alike()
    engine = prepared("dgc", model, list(model.named_parameters()))
    seen, states = Seen(), {}

    def save(step: int) -> None:
        train(engine, engine.step, step)
        states[step] = digest(by_name(engine))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            engine.save(directory)
        dist.barrier()

    def flip(folder: Path) -> None:
        if rank == 0:
            victim = chance.choice(
                sorted(f for f in folder.iterdir() if f.suffix == ".safetensors")
            )
            content = bytearray(victim.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            victim.write_bytes(content)
        dist.barrier()

    try:
        save(2)
        seen.more["saved"] = True
        save(4)
        if what == "symbolic link":
            if rank == 0:
                away = Path(directory).parent / f"{Path(directory).name}-away"
                shutil.move(folders(directory)[0], away)
                Path(directory, "step_0000000002").symlink_to(away)
            dist.barrier()
            save(6)
            save(8)
            wanted = 8
        elif what == "bit flip":
            flip(folders(directory)[-1])  # 4 is damaged, 2 the last good one
            save(6)
            flip(folders(directory)[-1])  # and 6 is, too
            wanted = 2
        elif what == "missing manifest":
            if rank == 0:
                hidden = folders(directory)[-1] / "manifest.json"
                hidden.rename(hidden.with_name("hidden"))
            dist.barrier()
            save(6)
            if rank == 0:  # a slow file system shows it again
                for folder in folders(directory):
                    if (folder / "hidden").exists():
                        (folder / "hidden").rename(folder / "manifest.json")
            dist.barrier()
            wanted = 6
        else:
            wanted = 4
        model = alike()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        engine.close()
        engine = prepared("dgc", model, list(model.named_parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            engine.load(directory)
        right = digest(by_name(engine)) == states[wanted]
        seen.common = (
            "right" if right else f"another one on rank {rank}: step {engine.step}, not {wanted}"
        )
        engine.close()
    except Exception as error:
        seen.raised(error)
    return seen


def damage(what: str) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            name = os.fsdecode(b"run-\xff\xfe") if what == "name that is not UTF-8" else "run"
            args = (what, str(Path(folder, name)), seed)
            answers = pool.run(
                saved_states, *args, timeout_s=60, group_timeout_s=TIMEOUT_S, expect_errors=True
            )
        outcome = judged(answers)
        # a name that cannot be used may be refused, before anything is saved
        saved = any(isinstance(answer, Seen) and answer.more.get("saved") for answer in answers)
        if outcome.verdict == "held" and "all ranks hold" not in outcome.detail and saved:
            return Outcome("silent", "what had been saved was not to be had: " + outcome.detail)
        return outcome

    return make_it


def not_atomic(rank: int, size: int, directory: str, seed: int) -> Seen:
    """Loading what does not fit has to leave everything as it was."""
    model = alike()
    engine = prepared("adamw", model, list(model.named_parameters()))
    train(engine, 0, 3)
    engine.save(directory)
    engine.close()
    other = alike()
    named = list(other.named_parameters())
    groups = [{"params": named[:4]}, {"params": named[4:], "lr": 0.5}]
    engine = prepared("adamw", other, groups)
    train(engine, 5, 7)
    seen = Seen(before=digest(by_name(engine)) + str(engine.step))
    try:
        engine.load(directory)
    except Exception as error:
        seen.raised(error)
    seen.after = digest(by_name(engine)) + str(engine.step)
    seen.common = "loaded"
    engine.close()
    return seen


def loads_atomically(pool: Pool, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        answers = pool.run(
            not_atomic, folder, seed, timeout_s=60, group_timeout_s=TIMEOUT_S, expect_errors=True
        )
    for rank, answer in enumerate(answers):
        if isinstance(answer, Seen) and answer.error and answer.before != answer.after:
            return Outcome(
                "silent", f"rank {rank} was left half loaded by {answer.error}: {answer.text[:300]}"
            )
    return judged(answers)


def hanging(rank: int, size: int, directory: str, seed: int) -> Seen:
    """The disk of one rank does not come back from forcing a file out."""
    chance = random.Random(seed)
    victim = chance.randrange(size)
    model = alike()
    options = (
        {"timeout": TIMEOUT_S} if "timeout" in inspect.signature(tw.local_sgd).parameters else {}
    )
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01)
    engine = tw.DistributedStrategy().prepare(model, optimizer, **options)
    train(engine, 0, 2)
    engine.save(directory)
    real = os.fsync
    if rank == victim:

        def hung(descriptor: int) -> None:
            time.sleep(45)
            real(descriptor)

        os.fsync = hung  # type: ignore[assignment]
    seen, begin_s = Seen(), time.monotonic()
    try:
        engine.save(directory)
    except Exception as error:
        seen.raised(error)
    finally:
        os.fsync = real  # type: ignore[assignment]
    seen.seconds, seen.common = time.monotonic() - begin_s, "saved"
    seen.more["victim"] = rank == victim
    return seen


def hangs(pool: Pool, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        answers = pool.run(
            hanging, folder, seed, timeout_s=120, group_timeout_s=TIMEOUT_S, expect_errors=True
        )
    if any(not isinstance(a, Seen) for a in answers):
        return judged(answers)
    others = [a for a in answers if not a.more["victim"]]
    seconds = max(a.seconds for a in others)
    details = "; ".join(f"{a.error} after {a.seconds:.1f} s: {a.text[:200]}" for a in answers)
    if any(not a.error for a in others) and seconds > TIMEOUT_S + GRACE_S:
        return Outcome("late", "the others waited: " + details, seconds=seconds)
    if seconds > TIMEOUT_S + GRACE_S:
        return Outcome("late", details, seconds=seconds)
    return Outcome("held", details, seconds=seconds)


USE_KERNELS = """
import torch, thinwire as tw
params = [torch.nn.Parameter(torch.ones(20_000)) for _ in range(2)]
for p in params: p.grad = torch.ones_like(p)
for optimizer in (tw.optim.DGCMomentum(params, lr=0.1), tw.optim.Lamb(params)): optimizer.step()
print("trained")
"""


def _start(cache: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE_KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def damaged_cache(pool: Pool, seed: int) -> Outcome:
    """Files of numba's cache are cut, emptied or changed: they are made again, with a warning."""
    chance = random.Random(seed)
    whole = Path(tempfile.gettempdir(), f"thinwire-attack-cache-{os.getpid()}")
    if not whole.exists():
        code, _, said = _start(whole)
        if code:
            return Outcome("skipped", f"the cache cannot be made: {said[-300:]}")
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        shutil.copytree(whole, cache)
        files = sorted(f for f in cache.rglob("*") if f.is_file() and f.stat().st_size)
        for victim in chance.sample(files, min(len(files), chance.randint(1, 3))):
            content = bytearray(victim.read_bytes())
            how = chance.choice(("empty", "cut", "flip", "garbage"))
            if how == "empty":
                content = bytearray()
            elif how == "cut":
                del content[chance.randrange(len(content)) :]
            elif how == "flip":
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            else:
                content = bytearray(chance.randbytes(len(content)))
            victim.write_bytes(content)
        first, second = _start(cache), _start(cache)
    for which, (code, out, said) in (("first", first), ("second", second)):
        if code or "trained" not in out:
            return Outcome("crash", f"{which} start: {said[-400:]}")
    if "Warning" in second[2]:
        return Outcome(
            "false",
            f"it was to be made again once, and the second start still warns: {second[2][-300:]}",
        )
    return Outcome("held", first[2][-200:])


ATTACKS = [
    *(
        Attack(
            "c",
            f"another order, {'named' if named else 'unnamed'}, {way}",
            order(way, named=named),
            times=10,
            quick=(way, named) == ("adamw", True),
        )
        for way in ("adamw", "dense", "dgc", "localsgd")
        for named in (True, False)
    ),
    Attack("c", "another order, named, own state_dict", own_order(named=True), times=10),
    Attack("c", "another order, unnamed, own state_dict", own_order(named=False), times=10),
    *(
        Attack("h", f"checkpoints: {what}", damage(what), times=10, quick=what == "bit flip")
        for what in ("symbolic link", "bit flip", "missing manifest", "name that is not UTF-8")
    ),
    Attack("h", "loading with other groups", loads_atomically, times=3, quick=True),
    Attack("h", "a disk that hangs", hangs, times=3),
    Attack("i", "damaged files in the cache of kernels", damaged_cache, times=5),
]  # fmt: skip
