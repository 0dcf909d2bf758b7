"""Attacks e, f and g: an error in the middle of a step, settings that change, values at the edge of
a float."""

import random
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.attacks.outcome import Attack, Outcome, Seen, judged
from tests.attacks.training import DGC, MEMBER_WAYS, batch, digest, make, small_model, under_attack
from tests.ranks import Lost, Pool

__all__ = ["ATTACKS"]


class Surprise(RuntimeError):
    """What the user's code raises."""


class _RaisingOnce:
    """An optimizer that raises once, when told."""

    raising = False

    def step(self, closure: Any = None) -> Any:
        if self.raising:
            self.raising = False
            raise Surprise("the optimizer")
        return super().step(closure)  # type: ignore[misc]


class Raising(_RaisingOnce, torch.optim.SGD):
    """Plain descent, whose mean gradient is dense."""


class RaisingAdamW(_RaisingOnce, torch.optim.AdamW):
    """Stays what it is under DGC, which compresses the mean gradient that it gets."""


def raised(rank: int, size: int, where: str, everywhere: bool, seed: int) -> Seen:
    """The optimizer, or a hook after its step, raises once, and the script goes on."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), 3 + chance.randrange(5)
    mine = everywhere or rank == victim
    model = small_model()
    fields: dict[str, Any] = {"dgc": tw.DGC(**DGC)} if "dgc" in where else {}
    merge = 2 if "merge" in where else 1
    if merge > 1:
        fields["gradient_merge"] = tw.GradientMerge(merge)
    if not where.startswith("optimizer"):
        given: Any = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    elif "dgc" in where:
        given = RaisingAdamW(model.named_parameters(), lr=1e-3)
    else:
        given = Raising(model.named_parameters(), lr=0.05)
    engine = tw.DistributedStrategy(**fields).prepare(model, given, nn.functional.cross_entropy)
    optimizer = engine.optimizer
    armed = [False]

    def hook(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise Surprise("a hook")

    if where.startswith("hook"):
        optimizer.register_step_post_hook(hook)

    def state() -> str:
        tree = engine.state_dict()
        tensors = {
            **_flat(tree["parameters"], "p"),
            **_flat(tree["optimizer"], "o"),
            **_flat(tree["exchange"], "e"),
        }
        return digest(tensors) + f" at {engine.step}"

    seen = Seen()
    micro = 0
    for number in range(at + 6):
        if number == at and mine:
            armed[0] = True
            if where.startswith("optimizer"):
                optimizer.raising = True
        for _ in range(merge):
            before = state()
            try:
                engine.train_step(*batch(micro, rank))
            except Surprise:
                seen.more["unmoved"] = before == state()
            except Exception as error:
                seen.raised(error)
                seen.before, seen.after, seen.updates = before, state(), number + 1 - at
                seen.more["step"] = engine.step
                return seen
            micro += 1
    names = dict(model.named_parameters())
    seen.common = digest({n: p.detach() for n, p in names.items()}) + f" at {engine.step}"
    seen.more["step"] = engine.step
    return seen


def _flat(tree: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list | tuple)
        else ()
    )
    return {key: value for k, entry in items for key, value in _flat(entry, f"{name}/{k}").items()}


def raises(where: str, *, everywhere: bool) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        answers = pool.run(
            raised, where, everywhere, seed, timeout_s=60, group_timeout_s=8, expect_errors=True
        )
        outcome = judged(answers)
        if outcome.verdict == "held" and outcome.updates is None and everywhere:
            moved = [r for r, a in enumerate(answers) if a.more.get("unmoved") is False]
            if moved and where.startswith("optimizer"):
                return Outcome(
                    "silent",
                    f"on ranks {moved} state moved though the update was not made, and training "
                    "went on",
                )
        return outcome

    return make_it


def killed_in_buffers(rank: int, size: int, seed: int) -> Seen | None:
    """A rank dies when the update is made, before changed buffers have been compared."""
    import os
    import signal

    chance = random.Random(seed)
    victim, at = chance.randrange(size), 3 + chance.randrange(5)
    trainer = make("dense")
    if rank == victim:

        def dying(*_: Any) -> None:
            if trainer.engine.step >= at:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.optimizer.register_step_post_hook(dying)
    return under_attack(trainer, None, at=at, last=at + 10)


def dies_in_buffers(pool: Pool, seed: int) -> Outcome:
    answers = pool.run(
        killed_in_buffers, seed, size=3, timeout_s=60, group_timeout_s=8, expect_errors=True
    )
    alive = [a for a in answers if not isinstance(a, Lost)]
    return judged(alive)


def sparser(rank: int, size: int, way: str, seed: int) -> Seen:
    """Another sparsity on one rank."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), 3 + chance.randrange(8)
    trainer = make(way)
    value = chance.choice([(0.5,), (0.9,), (0.999,)])

    def attack() -> None:
        for group in trainer.optimizer.param_groups:
            group["sparsity"] = value

    return under_attack(trainer, attack if rank == victim else None, at=at, last=at + 65)


def sparsity(way: str) -> Callable[[Pool, int], Outcome]:
    return lambda pool, seed: judged(
        pool.run(sparser, way, seed, timeout_s=60, group_timeout_s=8, expect_errors=True)
    )


def boasting(rank: int, size: int, way: str, seed: int) -> Seen:
    """The header of one rank's vote claims 2^60 bytes."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), 3 + chance.randrange(8)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real, armed = getattr(dist, name), [False]

    def tapped(out: torch.Tensor, message: torch.Tensor, *given: Any, **options: Any) -> Any:
        if armed[0] and message.dtype == torch.uint8 and message.numel() <= 64:
            armed[0] = False
            message = message.clone()
            message[:8] = torch.frombuffer(bytearray(struct.pack("<Q", 2**60)), dtype=torch.uint8)
        return real(out, message, *given, **options)

    setattr(dist, name, tapped)
    try:
        trainer = make(way)

        def attack() -> None:
            armed[0] = True

        return under_attack(trainer, attack if rank == victim else None, at=at, last=at + 20)
    finally:
        setattr(dist, name, real)


def boasts(way: str) -> Callable[[Pool, int], Outcome]:
    return lambda pool, seed: judged(
        pool.run(boasting, way, seed, timeout_s=60, group_timeout_s=8, expect_errors=True)
    )


def outlier(rank: int, size: int, everywhere: bool, seed: int) -> Seen:
    """One entry of a gradient is clipped after it was sent."""
    chance = random.Random(seed)
    victim, at = chance.randrange(size), 3 + chance.randrange(8)
    model = small_model(norm=False)
    optimizer = tw.optim.DGCMomentum(model.named_parameters(), lr=0.05, **DGC)
    ddp = DistributedDataParallel(model)
    optimizer.attach(ddp)
    seen = Seen()
    for number in range(at + 4):
        x, y = batch(number, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        if number == at and (everywhere or rank == victim):
            grad = chance.choice(list(model.parameters())).grad
            assert grad is not None
            entry = chance.randrange(grad.numel())
            grad.view(-1)[entry] *= 0.5
            if grad.view(-1)[entry] == 0:
                grad.view(-1)[entry] = 1e-3
        try:
            optimizer.step()
        except Exception as error:
            seen.raised(error)
            seen.updates = number + 1 - at
            return seen
    seen.common = "the clipping was passed over"
    return seen


def clips(*, everywhere: bool) -> Callable[[Pool, int], Outcome]:
    def make_it(pool: Pool, seed: int) -> Outcome:
        answers = pool.run(
            outlier, everywhere, seed, timeout_s=60, group_timeout_s=8, expect_errors=True
        )
        outcome = judged(answers)
        if outcome.verdict == "held" and outcome.updates is None:
            return Outcome("silent", "the clipping was passed over without a word")
        return outcome

    return make_it


def overflowing(rank: int, size: int, way: str, exchange: str, seed: int) -> Seen:
    """Finite gradients whose sum is none."""
    chance = random.Random(seed)
    at = 3 + chance.randrange(5)
    model = small_model(norm=False)
    options = {"exchange": exchange} if exchange else {}
    if way == "dense":
        given: Any = torch.optim.SGD(model.named_parameters(), lr=1e-39, momentum=0.9)
        engine = tw.DistributedStrategy().prepare(model, given)
    else:
        given = torch.optim.SGD(model.named_parameters(), lr=1e-39, momentum=0.9)
        engine = tw.DistributedStrategy(dgc=tw.DGC(**DGC, value_bits=32, **options)).prepare(
            model, given
        )
    big = chance.choice([p for p in model.parameters() if p.dim() > 1])
    entry = chance.randrange(big.numel())
    seen = Seen()
    import warnings

    for number in range(at + 4):
        x, y = batch(number, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        if number == at:
            loss = loss + big.view(-1)[entry] * 2.5e38
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                engine.minimize(loss)
        except Exception as error:
            seen.raised(error)
            return seen
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    finite = finite and all(
        t.isfinite().all() for t in _flat(engine.state_dict()["optimizer"], "o").values()
    )
    seen.common = digest(dict(model.state_dict())) if finite else f"not finite on rank {rank}"
    seen.more = {"dropped": engine.stats()["dropped_steps"]}
    return seen


def overflows(way: str, exchange: str = "") -> Callable[[Pool, int], Outcome]:
    return lambda pool, seed: judged(
        pool.run(
            overflowing, way, exchange, seed, timeout_s=60, group_timeout_s=8, expect_errors=True
        )
    )


_PLACES = (
    "optimizer raises, "
    "dense", "optimizer raises, dgc", "hook raises, dense", "hook raises, dgc", "hook raises, merge"
)  # fmt: skip
ATTACKS = [
    *(
        Attack(
            "e",
            f"{place}, {'every rank' if all_ else 'one rank'}",
            raises(place, everywhere=all_),
            times=10,
        )
        for place in _PLACES
        for all_ in (False, True)
    ),
    Attack("e", "killed while buffers are compared", dies_in_buffers, times=5),
    *(
        Attack("f", f"sparsity changed on one rank, {way}", sparsity(way), times=10)
        for way in ("dgc", "alone", "attach")
    ),
    *(
        Attack("f", f"a vote claims 2^60 bytes, {way}", boasts(way), times=10)
        for way in ("dense", "dgc", "local", *MEMBER_WAYS)
    ),
    Attack("g", "one outlier clipped after attach, one rank", clips(everywhere=False), times=20),
    Attack("g", "one outlier clipped after attach, every rank", clips(everywhere=True), times=20),
    Attack("g", "a sum overflows, dense", overflows("dense"), times=10),
    Attack("g", "a sum overflows, gather", overflows("dgc", "gather"), times=10),
    Attack("g", "a sum overflows, split", overflows("dgc", "split"), times=10),
]  # fmt: skip
