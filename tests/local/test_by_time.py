"""Rounds that end by time: ranks make unequal numbers of steps, and count by what they did."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.local.rounds import rounds_of, steps_that_take
from tests.local.test_laws import Bag, bag, digest, gradient, one_step, start_values, values
from tests.ranks import Pool, Raised

LONG_S = 1e9
STEPS = (5, 2, 3)
"""That each rank makes in a round, whatever its time."""
TOKENS = (10, 70, 20)
ROUNDS = 6
FIRST = 1
"""Parameters of the first of two fragments of `Bag`."""
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5, "outer_nesterov": True}


def paced(rank: int, config: tw.LocalSGD, tokens: bool, each: Callable[[Any, Bag], None]) -> Bag:
    """Train for `ROUNDS` rounds of `STEPS[rank]` steps; `each` is called before every averaging."""
    model, optimizer = bag()
    with rounds_of(STEPS[rank]), tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, ROUNDS * STEPS[rank] + 1):
            sync.observe(0.0, tokens=TOKENS[rank] if tokens else None)
            one_step(model, optimizer, step, rank)
            assert sync.synced == (step % STEPS[rank] == 0)
            if sync.synced:
                each(sync, model)
        assert sync.step == ROUNDS * max(STEPS)
    return model


def follow(rank: int, size: int, config: tw.LocalSGD, tokens: bool) -> list[Any]:
    found: list[Any] = []
    paced(rank, config, tokens, lambda _, model: found.append(values(model)))
    return found


def expected(
    parts: list[list[str]],
    tokens: tuple[int, ...] = (1, 1, 1),
    outer: tuple[float, float, bool] = (1.0, 0.0, False),
) -> list[Any]:
    """The anchors after each averaging of `paced`, in loops over ranks, rounds and steps."""
    rate, momentum, nesterov = outer
    anchor = {name: value.numpy().copy() for name, value in start_values().items()}
    velocity = {name: np.zeros_like(value) for name, value in anchor.items()}
    models = [{name: value.copy() for name, value in anchor.items()} for _ in STEPS]
    done, since, found = [0] * len(STEPS), [[0] * len(parts) for _ in STEPS], []

    def average(names: list[str], weights: list[int]) -> None:
        for name in names:
            ends = [model[name] for model in models]
            change = sum(w * (anchor[name] - end) for w, end in zip(weights, ends, strict=True))
            change = change / sum(weights)
            velocity[name] = momentum * velocity[name] + change
            moved = change + momentum * velocity[name] if nesterov else velocity[name]
            anchor[name] = anchor[name] - rate * moved
            for model in models:
                model[name] = anchor[name].copy()
        found.append(dict(anchor))

    for number in range(ROUNDS):
        for rank, steps in enumerate(STEPS):
            for _ in range(steps):
                done[rank] += 1
                for name, p in models[rank].items():
                    models[rank][name] = p - 0.1 * gradient(done[rank], rank, name, p)
            since[rank] = [count + steps for count in since[rank]]
        part = number % len(parts)
        average(parts[part], [n[part] * t for n, t in zip(since, tokens, strict=True)])
        for counts in since:
            counts[part] = 0
    if len(parts) > 1:
        # leaving averages the whole model, by the steps since the fragment averaged longest ago
        average(list(anchor), [max(counts) for counts in since])
    return found


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("outer", [{}, OUTER])
def test_mean_is_weighted_by_the_work_of_every_rank(
    ranks: Pool, tokens: bool, outer: dict[str, Any]
) -> None:
    config = tw.LocalSGD(99, begin_step=0, round_seconds=LONG_S, **outer)
    found = ranks.run(follow, config, tokens, size=3)
    rule = (outer.get("outer_lr", 1.0), outer.get("outer_momentum", 0.0), bool(outer))
    oracle = expected([list(start_values())], TOKENS if tokens else (1, 1, 1), rule)
    for rounds in found:
        for mine, theirs in zip(rounds, oracle, strict=True):
            for name in mine:
                # 1e-9: float64 sums in another order
                np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, atol=1e-9)
    assert all(
        np.array_equal(one[name], other[name])
        for one, other in zip(found[0], found[1], strict=True)
        for name in one
    )


def kept(rank: int, size: int, config: tw.LocalSGD) -> tuple[Any, Any, Any]:
    """The start, the end, and what this rank has kept."""
    last: dict[str, Any] = {}

    def note(sync: Any, _: Bag) -> None:
        averaging = sync._averager.averaging
        last["anchors"] = {n: a.clone() for n, a in averaging.anchors.items()}
        last["errors"] = {n: e.clone() for n, e in averaging.errors.items()}
        weight = sync._averager.weight
        total = last.setdefault("total", dict.fromkeys(last["change"], 0.0))
        for name, change in last["change"].items():
            total[name] = total[name] + weight * change

    averaging = unwrap(tw.local_sgd).__globals__["Averaging"]
    measure = averaging.measure

    def measured(self: Any, step: int, given: Any, *args: Any, **kwargs: Any) -> Any:
        pending = measure(self, step, given, *args, **kwargs)
        changes = pending.moved
        last["change"] = dict(type(changes)(self, changes.params, frozenset()))
        return pending

    with patch.object(averaging, "measure", measured):
        paced(rank, config, False, note)
    return last["total"], last["anchors"], last["errors"]


def test_sent_and_kept_sum_up_to_the_weighted_changes(ranks: Pool) -> None:
    config = tw.LocalSGD(
        99, begin_step=0, round_seconds=LONG_S, compression=tw.Quantized(4, decay=1.0)
    )
    found = ranks.run(kept, config, size=3)
    for name, start in start_values().items():
        changed = sum(total[name] for total, _, _ in found) / 3
        left = sum(errors[name] for _, _, errors in found) / 3
        moved = start - found[0][1][name]
        # 1e-5: the wire carries float32 scales
        torch.testing.assert_close(moved + left, changed, rtol=1e-5, atol=1e-5)


def trained(rank: int, size: int, config: tw.LocalSGD) -> tuple[list[str], float]:
    model, optimizer = bag()
    found = []
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 18):
            one_step(model, optimizer, step, rank)
            if sync.synced:
                found.append(digest(model))
    return [*found, digest(model)], sync.stats()["bytes_sent"]


@pytest.mark.parametrize(
    "others",
    [
        {},
        OUTER,
        {"compression": tw.Quantized(2)},
        {"begin_step": 3},
        {"fragments": 2},
        {"delay": 2, "compression": tw.Quantized(2)},
        {"fragments": 2, "delay": 1, **OUTER},
    ],
    ids=str,
)
def test_equal_weights_give_the_bits_of_counted_rounds(ranks: Pool, others: dict[str, Any]) -> None:
    counted = ranks.run(trained, tw.LocalSGD(4, **others), size=3)
    timed = ranks.run(trained, tw.LocalSGD(4, round_seconds=LONG_S, **others), size=3)
    assert [bits for bits, _ in timed] == [bits for bits, _ in counted]


PULLS = (1.0, -2.0)
"""The gradient of each rank, in every step."""


def equally_often(rank: int, size: int, others: dict[str, Any]) -> tuple[float, int]:
    """The same loop on a slow and a fast rank, with a flush in its middle."""
    layer = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    config = tw.LocalSGD(1000, round_seconds=4.0, **{"begin_step": 0, **others})
    with steps_that_take((1.0, 0.25)[rank]), tw.local_sgd(layer, optimizer, config) as sync:
        for step in range(31):
            layer.weight.grad = torch.full_like(layer.weight, PULLS[rank])
            sync.observe(0.0, tokens=1)
            optimizer.step()
            if step == 8:
                sync.flush()
    return float(layer.weight.detach()), sync.step


@pytest.mark.parametrize(
    "others", [{}, {"delay": 300}, {"compression": tw.Quantized(8)}, {"begin_step": 3}], ids=str
)
def test_loops_of_unequal_ranks_end_together(ranks: Pool, others: dict[str, Any]) -> None:
    """Rank 1 makes 16 steps in a round, and waits for rank 0 at the flush and at the end."""
    first, second = ranks.run(equally_often, others)
    assert first == second
    if others:
        return
    value, steps = 0.0, 0
    for made in [(4, 9), (4, 0), (1, 0), (4, 16), (4, 6), *[(4, 0)] * 3, (2, 0)]:
        # each rank has moved by its own steps, which are its weight too
        value -= sum(n * n * pull for n, pull in zip(made, PULLS, strict=True)) / sum(made)
        steps += max(made)
    assert first == (pytest.approx(value), steps)


def fragments(rank: int, size: int) -> tuple[Any, list[int]]:
    config = tw.LocalSGD(99, begin_step=0, round_seconds=LONG_S, fragments=2)
    model = paced(rank, config, False, lambda *_: None)
    groups = unwrap(tw.local_sgd).__globals__["fragments_of"](
        dict(model.named_parameters()), config
    )
    return values(model), [len(group) for group in groups]


def test_a_fragment_counts_by_the_steps_since_it_was_averaged(ranks: Pool) -> None:
    names = list(start_values())
    oracle = expected([names[:FIRST], names[FIRST:]])
    for found, sizes in ranks.run(fragments, size=3):
        assert sizes[0] == FIRST
        for name, value in oracle[-1].items():
            # 1e-9: float64 sums in another order
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9)


def slow_and_fast_with_delay(
    rank: int, size: int, stop: bool, momentum: float
) -> tuple[list[int], int, str]:
    """A slow and a fast rank, with two fragments whose results arrive a quarter of a round later.

    With `stop` the block is left after the third averaging, with its result in flight, and
    another goes on from the state.
    """
    model, made, state = Bag(), [0], None
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum)
    how = {"compression": tw.Quantized(4), "average_state": momentum > 0}
    config = tw.LocalSGD(64, 1, round_seconds=8.0, fragments=2, delay=16, **how)
    with steps_that_take((1.0, 0.25)[rank]):
        for until in (3, 6) if stop else (6,):
            with tw.local_sgd(model, optimizer, config) as sync:
                if state is not None:
                    sync.load_state_dict(state)
                while len(made) <= until:
                    one_step(model, optimizer, sync.step + 1, rank)
                    made[-1] += 1
                    if sync.synced:
                        made.append(0)
                state = sync.state_dict()
                if until < 6:
                    sync.close()  # the result in flight is in the state
    return made[:-1], sync.step, digest(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fragments_and_delay_go_by_the_clock(ranks: Pool, momentum: float) -> None:
    (slow, step, bits), fast = ranks.run(slow_and_fast_with_delay, False, momentum)
    assert slow == [1, 4, 4, 4, 4, 4]
    assert fast == ([1, 16, 16, 16, 16, 16], step, bits)
    assert ranks.run(slow_and_fast_with_delay, True, momentum) == [(slow, step, bits), fast]


def telling(rank: int, size: int, case: str) -> None:
    model, optimizer = bag()
    config = tw.LocalSGD(2, begin_step=0, round_seconds=LONG_S)
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 3):
            tells = {"one rank": rank == 0, "one step": step == 1 or rank == 0}.get(case)
            sync.observe(0.0, tokens=8 if tells else None)
            one_step(model, optimizer, step, rank)
            if case == "state":
                sync.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("one rank", "ranks [1] reported no tokens in this round"),
        ("one step", "1 of the 2 steps of this round reported tokens"),
        ("state", "save right after an averaging"),
    ],
)
def test_settings_that_do_not_fit_are_an_error_on_all(ranks: Pool, case: str, text: str) -> None:
    for answer in ranks.run(telling, case, expect_errors=True):
        assert isinstance(answer, Raised)
        assert text in answer.text
