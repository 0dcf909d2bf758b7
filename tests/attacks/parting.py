"""Attack b: what makes ranks part: a bit flipped in memory or on the wire, a value changed, a CPU
that differs."""

import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.api import traffic
from tests.attacks.outcome import Attack, Outcome, Seen, judged
from tests.attacks.training import (
    MEMBER_WAYS,
    WAYS,
    batch,
    digest,
    flip_bit,
    make,
    small_model,
    under_attack,
)
from tests.ranks import Pool

__all__ = ["ATTACKS"]

DIGEST_EVERY = 64
WARM = 3
LAST = WARM + 8 + DIGEST_EVERY


def flipped(rank: int, size: int, way: str, kind: str, seed: int) -> Seen:
    """One bit of one tensor of a kind, on one rank, between two updates."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), WARM + chance.randrange(8)
    trainer = make(way)

    def attack() -> None:
        found = {name: t for name, t in trainer.tensors().items() if name.startswith(kind + " ")}
        assert found, f"{way} has no {kind}"
        name = chance.choice(sorted(found))
        flip_bit(found[name], chance)

    return under_attack(
        trainer, attack if rank == victim else None, at=at, last=at + DIGEST_EVERY + 1
    )


def flips(way: str, kind: str) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        answers = pool.run(flipped, way, kind, seed, timeout_s=120, expect_errors=True)
        return judged(answers, within=DIGEST_EVERY)

    return make_it


def changed(rank: int, size: int, way: str, what: str, seed: int) -> Seen:
    """A setting or a value that the user's code changes on one rank."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), WARM + chance.randrange(8)
    trainer = make(way)

    def attack() -> None:
        groups = trainer.optimizer.param_groups
        if what == "weight decay":
            groups[0]["weight_decay"] = 0.05
        elif what == "momentum":
            key = "momentum" if "momentum" in groups[0] else "betas"
            groups[0][key] = 0.5 if key == "momentum" else (0.5, 0.9)
        else:
            parameter = chance.choice(list(trainer.model.parameters()))
            with torch.no_grad():
                parameter.add_(1e-3)

    return under_attack(
        trainer, attack if rank == victim else None, at=at, last=at + DIGEST_EVERY + 1
    )


def changes(way: str, what: str) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        return judged(
            pool.run(changed, way, what, seed, timeout_s=120, expect_errors=True),
            within=DIGEST_EVERY,
        )

    return make_it


class _Cache(nn.Module):
    """Keeps what it has seen, so its buffer has another shape in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.rows = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean(1)[: self.rows]])
        return x


def growing(rank: int, size: int, seed: int) -> Seen:
    """A cache that grows faster on one rank, beside batch norm."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), WARM + chance.randrange(8)
    model = nn.Sequential(_Cache(), *small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = tw.DistributedStrategy().prepare(model, optimizer, nn.functional.cross_entropy)
    seen = Seen()

    def statistics() -> str:
        return digest({n: b for n, b in model.state_dict().items() if "running" in n})

    for number in range(at + DIGEST_EVERY + 1):
        if number == at and rank == victim:
            model[0].rows = chance.randrange(2, 9)
        try:
            engine.train_step(*batch(number, rank))
        except Exception as error:
            seen.raised(error)
            seen.updates = number + 1 - at
            break
    normal = all(
        torch.isfinite(b).all() and b.abs().max() < 100
        for n, b in model.state_dict().items()
        if "running" in n
    )
    seen.common = statistics() if normal else f"garbage on rank {rank}"
    return seen


def grows(pool: Pool, seed: int) -> Outcome:
    return judged(pool.run(growing, seed, timeout_s=120, expect_errors=True), within=DIGEST_EVERY)


def swapped(rank: int, size: int, way: str, seed: int) -> Seen:
    """Two trainers of alike models, stepped the other way round on one rank from some moment on."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), WARM + chance.randrange(8)
    first, second = make(way), make(way)
    seen = Seen()
    for number in range(at + DIGEST_EVERY + 1):
        turns = [(first, 0), (second, 500)]
        if number >= at and rank == victim:
            turns.reverse()
        before = first.digest() + second.digest()
        try:
            for trainer, shift in turns:
                trainer.step(number + shift)
                before = first.digest() + second.digest()
        except Exception as error:
            seen.raised(error)
            seen.before, seen.after = before, first.digest() + second.digest()
            seen.updates = number + 1 - at
            break
    seen.common = first.common() + second.common()
    if not seen.error:
        seen.common += "mixed"  # never equal to an undisturbed run
    return seen


def swaps(way: str) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        outcome = judged(
            pool.run(swapped, way, seed, timeout_s=120, expect_errors=True), within=DIGEST_EVERY
        )
        if outcome.verdict == "held" and outcome.updates is None:
            return Outcome("silent", "two models were mixed, the same way on all ranks")
        return outcome

    return make_it


def trained(rank: int, size: int, way: str, flush: bool) -> Seen:
    """Undisturbed from the start; what differs is the machine."""
    if flush and rank == 1:
        torch.set_flush_denormal(True)
    try:
        try:
            trainer = make(way)
        except Exception as error:
            family = isinstance(error, tw.errors.ThinwireError)
            return Seen(type(error).__name__, family, str(error))
        if flush:  # gradients small enough for it to matter
            with torch.no_grad():
                for parameter in trainer.model[-1].parameters():
                    parameter.mul_(1e-38)
        return under_attack(trainer, None, at=0, last=DIGEST_EVERY + 1)
    finally:
        torch.set_flush_denormal(False)


def other_machine(way: str, kind: str) -> Callable[[Pool, int], Outcome]:
    """Rank 1 lacks numba, or has a CPU without AVX, or flushes denormals to zero."""

    def make_it(pool: Pool, seed: int) -> Outcome:
        if kind == "flush":
            return judged(
                pool.run(trained, way, True, timeout_s=120, expect_errors=True), within=DIGEST_EVERY
            )
        mixed = Pool(fresh=True)
        kept = dict(os.environ)
        with tempfile.TemporaryDirectory() as folder:
            try:
                mixed._grow(1)
                if kind == "numba":
                    package = Path(folder, "numba")
                    package.mkdir()
                    (package / "__init__.py").write_text(
                        "raise ImportError('not installed on this rank')\n"
                    )
                    sys.path.insert(0, folder)  # a process that is spawned gets this list
                else:
                    os.environ["ATEN_CPU_CAPABILITY"] = "default"
                mixed._grow(2)
                sys.path[:] = [path for path in sys.path if path != folder]
                answers = mixed.run(trained, way, False, timeout_s=180, expect_errors=True)
            finally:
                os.environ.clear()
                os.environ.update(kept)
                mixed.close()
        return judged(answers, within=DIGEST_EVERY)

    return make_it


def undisturbed(way: str) -> Callable[[Pool, int], Outcome]:
    """Without an attack there is no error, and all ranks hold the same."""

    def make_it(pool: Pool, seed: int) -> Outcome:
        outcome = judged(pool.run(trained, way, False, expect_errors=True))
        return (
            outcome
            if outcome.updates is None
            else Outcome("false", "an error came of nothing: " + outcome.detail)
        )

    return make_it


_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all_single",
)


class _Flipping:
    """A work whose result has one bit flipped when it is there."""

    def __init__(self, work: Any, result: torch.Tensor, chance: random.Random) -> None:
        self._work, self._result, self._chance = work, result, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *given: Any) -> Any:
        done = self._work.wait(*given)
        if self._chance is not None:
            flip_bit(self._result, self._chance)
            self._chance = None  # type: ignore[assignment]
        return done


def on_the_wire(
    rank: int,
    size: int,
    way: str,
    names: tuple[str, ...],
    small: bool,
    sent: bool,
    whole: bool,
    seed: int,
) -> Seen:
    """One bit of a rank's traffic is flipped below the library, in a call of one kind: in what it
    gives to all (`sent`), or in what it alone gets.
    """
    chance = random.Random(seed)
    victim, at = (
        chance.randrange(size),
        0 if names == ("broadcast",) else WARM + chance.randrange(8),
    )
    armed = [False]
    real = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def tapped(name: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
            nbytes = tensor.numel() * tensor.element_size()
            fits = armed[0] and name in names and nbytes > 200 and (nbytes < 2000) == small
            if fits and sent:
                armed[0] = False
                own = tensor if name == "all_reduce" else given[0]
                flip_bit(own, chance)
            work = real[name](tensor, *given, **options)
            if not fits or sent:
                return work
            armed[0] = False
            if work is None:
                flip_bit(tensor, chance)
                return None
            return _Flipping(work, tensor, chance)

        return call

    for name in real:
        setattr(dist, name, tapped(name))
    most = traffic._MOST_CHECKSUMMED_BYTES
    traffic._MOST_CHECKSUMMED_BYTES = -1 if whole else most
    try:
        armed[0] = rank == victim and names == ("broadcast",)
        try:
            trainer = make(way, apart=names == ("broadcast",))
        except Exception as error:
            return Seen(
                type(error).__name__, isinstance(error, tw.errors.ThinwireError), str(error)
            )

        def attack() -> None:
            armed[0] = True

        seen = under_attack(
            trainer, attack if rank == victim else None, at=at, last=at + DIGEST_EVERY + 1
        )
        seen.more["hit"] = not armed[0]
        return seen
    finally:
        traffic._MOST_CHECKSUMMED_BYTES = most
        for name, function in real.items():
            setattr(dist, name, function)


def wire(
    way: str, *names: str, small: bool = False, sent: bool = False, whole: bool = False
) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        given = (way, names, small, sent, whole, seed)
        answers = pool.run(on_the_wire, *given, timeout_s=120, expect_errors=True)
        if not all(getattr(answer, "more", {}).get("hit", True) for answer in answers):
            return Outcome("crash", "no message was hit: the attack itself is wrong")
        outcome = judged(answers, within=DIGEST_EVERY)
        if sent and outcome.verdict == "held" and outcome.updates is None:
            return Outcome("silent", "a damaged part went into the sum of all ranks")
        return outcome

    return make_it


_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_STATE = {
    "dense": "momentum_buffer",
    "adamw": "exp_avg_sq",
    "lamb": "exp_avg",
}

ATTACKS = [
    *(Attack("b", f"control: nothing is done, {way}", undisturbed(way), times=2) for way in WAYS),
    *(
        Attack(
            "b",
            f"bit of a parameter, {way}",
            flips(way, "parameter"),
            times=20,
            quick=way == "dense",
        )
        for way in ("dense", "adamw", "dgc", "adamw-dgc", "lamb", "attach", "alone")
    ),
    *(
        Attack("b", f"bit of {kind}, {way}", flips(way, kind), times=20, quick=way == "adamw")
        for way, kind in _STATE.items()
    ),
    Attack("b", "bit of a buffer, dense", flips("dense", "buffer"), times=20),
    *(
        Attack("b", f"bit of an anchor, {way}", flips(way, "anchor"), times=20, quick=True)
        for way in ("sparse-local", *MEMBER_WAYS)
    ),
    *(
        Attack("b", f"{what} changed on one rank, {way}", changes(way, what), times=10)
        for what in ("weight decay", "momentum", "parameter")
        for way in ("dense", "adamw", "dgc", "alone")
    ),
    Attack("b", "buffers of other shapes", grows, times=10, quick=True),
    *(
        Attack("b", f"two models stepped in another order, {way}", swaps(way), times=10)
        for way in ("dense", "dgc", "alone")
    ),
    *(
        Attack("b", f"no numba on one rank, {way}", other_machine(way, "numba"), times=1)
        for way in ("lamb", "dgc", "local")
    ),
    *(
        Attack("b", f"no AVX on one rank, {way}", other_machine(way, "avx"), times=1)
        for way in ("dense", "adamw", "dgc", "lamb")
    ),
    *(
        Attack("b", f"flush-to-zero on one rank, {way}", other_machine(way, "flush"), times=1)
        for way in ("dense", "adamw", "dgc", "lamb")
    ),
    Attack(
        "b",
        "bit of a dense mean, dense",
        wire("dense", "all_reduce", whole=True),
        times=30,
        quick=True,
    ),
    Attack("b", "bit of a small mean, dense", wire("dense", *_GATHERS), times=20),
    Attack("b", "bit of a small mean, dgc", wire("dgc", *_GATHERS, small=True), times=20),
    *(
        Attack(
            "b",
            f"bit of a part of a small mean, {way}",
            wire(way, *_GATHERS, sent=True),
            times=20,
            quick=quick,
        )
        for way, quick in (("dense", True), ("dgc", False), ("local", False))
    ),
    Attack(
        "b", "bit of a dense mean, dgc", wire("dgc", "all_reduce", small=True, whole=True), times=20
    ),
    Attack("b", "bit of a gathered message, dgc", wire("dgc", *_GATHERS), times=20),
    *(
        Attack(
            "b",
            f"bit of {what}, {way}",
            wire(way, *_GATHERS, sent=sent, small=small),
            times=20,
            quick=way == "relayed",
        )
        for what, sent, small in (
            ("a gathered message at one", False, False),
            ("a gathered message at all", True, False),
            ("a small gathered message", True, True),
        )
        for way in MEMBER_WAYS
    ),
    Attack("b", "bit of an averaging, local", wire("local", "all_reduce", whole=True), times=20),
    Attack("b", "bit of the initial copy, dense", wire("dense", "broadcast"), times=10),
    Attack("b", "bit of the initial copy, local", wire("local", "broadcast"), times=10),
]
