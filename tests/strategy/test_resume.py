"""Interrupted training goes on as if it had not been, and on another number of ranks."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import FIELDS, batch, digest, make_engine, train
from tests.toys import engine_of

NARROW = tw.DGC(5, 2, (0.75, 0.9), min_numel=64, state_dtype="bfloat16")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{name: ((name,), {}) for name in FIELDS},
    "dgc in bfloat16 under lamb": (("dgc", "lamb"), {"dgc": NARROW}),
    "dgc and localsgd": (("dgc", "localsgd"), {"localsgd": tw.LocalSGD(3)}),
    "pipeline, amp, dgc": (("amp", "pipeline", "dgc"), {}),
    "pipeline, merge, dgc in one node": (
        ("pipeline", "gradient_merge", "dgc"),
        {"dgc": tw.DGC(1, sparsity=(0.75,), min_numel=64, node_size=2)},
    ),
    "pipeline, merge, localsgd": (("pipeline", "gradient_merge", "localsgd"), {}),
}
"""Beside those of the matrix in `tests/laws`."""
MICROSTEPS = 11
LOST = ("lost_waiting", "lost_regrouping", "lost_joining", "lost_saving")
TIMES = ("wait_s", "rate_bit_s", "waiting_share", "goodput", *LOST)
OF_PROCESS = (*TIMES, "grad_norm", "clipped_share", "drift")
COUNTED = ("bytes_sent", "bytes_received", "bytes_between_nodes", "bytes_between_stages")
TRAFFIC = (*COUNTED, "ratio", *TIMES)


def interrupted(
    rank: int, size: int, case: str, at: int, folder: str
) -> tuple[str, str, list[float], list[float]]:
    fields, replace = CASES[case]
    straight = make_engine(fields, replace=replace)
    torch.manual_seed(rank)
    train(straight, fields, 0, at)
    straight.save(folder)
    waited_s = straight.stats()["wait_s"]
    expected = train(straight, fields, at, MICROSTEPS)
    straight.flush()
    straight.close()

    resumed = make_engine(fields, replace=replace)
    train(resumed, fields, 100, 103)  # it has been somewhere else before
    resumed.load(folder)
    found = train(resumed, fields, at, MICROSTEPS)
    resumed.flush()
    # what was on its way at the save travels again, and a handshake may fall before or after it
    told = [{k: v for k, v in e.stats().items() if k not in TRAFFIC} for e in (resumed, straight)]
    assert told[0] == told[1]
    for name in COUNTED:
        assert resumed.stats()[name] == pytest.approx(straight.stats()[name], rel=0.15)
    assert resumed.stats()["wait_s"] > waited_s
    resumed.close()
    return digest(straight), digest(resumed), expected, found


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 7])
@pytest.mark.parametrize("case", CASES)
def test_resumed_training_is_bit_for_bit(case: str, at: int, ranks: Pool, tmp_path: Path) -> None:
    size = 4 if "pipeline" in CASES[case][0] else 2
    for straight, resumed, expected, found in ranks.run(
        interrupted, case, at, str(tmp_path), size=size
    ):
        assert found == expected
        assert resumed == straight


# ---- another number of ranks

RESHARD: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dgc": (("dgc",), {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64)}),
    "dgc under lamb": (("dgc", "lamb"), {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64)}),
    "dgc in bfloat16": (
        ("dgc",),
        {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64, state_dtype="bfloat16")},
    ),
    "dgc in nodes": (("dgc",), {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64, node_size=2)}),
    "dgc in nodes, split, under lamb": (
        ("dgc", "lamb"),
        {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64, node_size=2, exchange="split")},
    ),
    "sparse local": (
        ("localsgd",),
        {"localsgd": tw.LocalSGD(2, compression=tw.Sparse(0.9, decay=1.0, mean_over="all"))},
    ),
    "quantized local": (("localsgd",), {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(2))}),
    "low rank": (("low_rank",), {"low_rank": tw.LowRank(2, begin_step=1, min_numel=64)}),
    "outer momentum, on its way": (
        ("localsgd",),
        {"localsgd": tw.LocalSGD(4, fragments=2, delay=1, outer_momentum=0.5)},
    ),
    "low rank local in nodes, on its way": (
        ("localsgd",),
        {
            "localsgd": tw.LocalSGD(
                4,
                fragments=2,
                delay=1,
                node_size=2,
                compression=tw.LowRank(2, begin_step=0, min_numel=64),
            )
        },
    ),
    "adaptive, averaged state": (
        ("adaptive_localsgd",),
        {"adaptive_localsgd": tw.AdaptiveLocalSGD(3, delay=1, average_state=True)},
    ),
    "between averagings": (("localsgd",), {"localsgd": tw.LocalSGD(5)}),
    "in a merge": (("gradient_merge",), {"gradient_merge": tw.GradientMerge(4)}),
    "pipeline": (("pipeline", "dgc"), {"dgc": tw.DGC(sparsity=(0.9,), min_numel=64)}),
}


def pending_of(engine: Any) -> dict[str, Tensor]:
    """What this rank has not given to the others yet, by name."""
    state = engine.state_dict()
    late = state["exchange"].get("pending") or {}
    kinds = {**state["exchange"], "measured": late.get("measured")}
    found = {
        f"{kind} {k}": v
        for kind in ("residuals", "factors", "outer_momentum", "local", "measured")
        for k, v in (kinds.get(kind) or {}).items()
    }
    for index, entries in state["optimizer"]["state"].items():
        found |= {
            f"{key} {index}": v
            for key, v in entries.items()
            if key in ("residual", "momentum_buffer")
        }
    if state["merge"]:
        found |= {f"merged {k}": v for k, v in state["merge"]["sums"].items()}
    assert found
    return {name: value.clone() for name, value in found.items()}


def leave(rank: int, size: int, case: str, folder: str) -> tuple[int, dict[str, Tensor]]:
    fields, replace = RESHARD[case]
    engine = make_engine(fields, replace=replace, plain=True, dtype=torch.float64)
    train(engine, fields, 0, 7 if case.endswith(("merge", "way")) else 6, dtype=torch.float64)
    engine.save(folder)
    found = pending_of(engine)
    assert not case.endswith("way") or any(name.startswith("measured") for name in found)
    engine.close()
    return rank % 2 if "pipeline" in fields else 0, found


def enter(
    rank: int, size: int, case: str, source: str, target: str
) -> tuple[int, dict[str, Tensor], list[float]]:
    fields, replace = RESHARD[case]
    engine = make_engine(fields, replace=replace, plain=True, dtype=torch.float64)
    engine.load(source)
    now = pending_of(engine)
    engine.save(target)
    losses = train(engine, fields, 7, 12, dtype=torch.float64)
    engine.flush()
    engine.close()
    return rank % 2 if "pipeline" in fields else 0, now, losses


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for part in parts for name in part}
    return {
        name: torch.stack([part[name] for part in parts if name in part]).mean(0) for name in names
    }


@pytest.mark.fault("4 to 2 to 4 ranks")
@pytest.mark.slow
@pytest.mark.parametrize("case", RESHARD)
def test_four_ranks_to_two_to_four_keep_it_pending(case: str, ranks: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("four", "two", "again")]
    before = ranks.run(leave, case, folders[0], size=4)
    two = ranks.run(enter, case, folders[0], folders[1], size=2)
    four = ranks.run(enter, case, folders[1], folders[2], size=4)
    for stage in {stage for stage, _ in before}:
        expected = mean_of([part for s, part in before if s == stage])
        for answers in (two, four):
            found = mean_of([part for s, part, _ in answers if s == stage])
            for name, value in expected.items():
                # the mean of several bfloat16 is rounded to the nearest one
                rtol = 2.0**-8 if value.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(
                    found[name].double(), value.double(), rtol=rtol, atol=1e-9, msg=name
                )
    assert all(math.isfinite(loss) for _, _, losses in (*two, *four) for loss in losses)


# ---- ranks that have dropped local steps each for itself

SCALED = {"amp": tw.AMP("bfloat16", tw.DynamicLossScale(64.0, scale_window=3))}
OVERFLOWING: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "localsgd": (("amp", "localsgd"), SCALED),
    "localsgd under lamb": (("amp", "localsgd", "lamb"), SCALED),
    "adaptive, merged": (("amp", "adaptive_localsgd", "gradient_merge"), SCALED),
    "merged": (("amp", "gradient_merge"), SCALED),
    "dgc": (("amp", "dgc"), SCALED),
}


def overflow(engine: Any, rank: int) -> None:
    """One microstep whose gradient is infinite on rank 1 only."""
    outputs = engine.model(batch(99, rank)[0])
    engine.minimize(outputs.float().pow(2).mean() * (math.inf if rank == 1 else 1.0))


def overflown(
    rank: int, size: int, case: str, folder: str
) -> tuple[int, int, str, str, str, list[float], list[float]]:
    fields, replace = OVERFLOWING[case]
    straight = make_engine(fields, replace=replace)
    train(straight, fields, 0, 2)
    overflow(straight, rank)
    train(straight, fields, 2, 5)
    told = straight.stats()
    name = straight.save(folder).name
    expected = train(straight, fields, 5, 12)
    straight.flush()

    resumed = make_engine(fields, replace=replace)
    resumed.load(folder)
    both = [{k: v for k, v in s.items() if k not in OF_PROCESS} for s in (resumed.stats(), told)]
    assert both[0] == both[1]
    found = train(resumed, fields, 5, 12)
    resumed.flush()
    assert resumed.save(folder).name[:15] == straight.save(folder).name[:15]
    digests = digest(straight), digest(resumed)
    straight.close()
    resumed.close()
    return told["step"], told["dropped_steps"], name, *digests, expected, found


@pytest.mark.parametrize("case", OVERFLOWING)
def test_overflow_on_one_rank_stops_no_save_or_load(case: str, ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(overflown, case, str(tmp_path), size=2)
    fields = OVERFLOWING[case][0]
    local = "localsgd" in fields or "adaptive_localsgd" in fields
    calls = 3 if "gradient_merge" in fields else 6
    assert [dropped for _, dropped, *_ in answers] == ([0, 1] if local else [1, 1])
    for step, dropped, name, straight, resumed, expected, found in answers:
        assert step == calls - dropped
        assert name.startswith(f"step_{calls if local else step:010d}")
        assert resumed == straight
        assert found == expected


def overflown_on_two(rank: int, size: int, folder: str) -> None:
    engine = make_engine(("amp", "localsgd", "lamb"), replace=SCALED)
    train(engine, (), 0, 2)
    overflow(engine, rank)
    engine.save(folder)
    engine.close()


def gone_on_with(rank: int, size: int, folder: str) -> tuple[dict[str, Any], set[float]]:
    engine = make_engine(("amp", "localsgd", "lamb"), replace=SCALED)
    engine.load(folder)
    steps = {float(entry["step"]) for entry in engine.optimizer.state_dict()["state"].values()}
    told = engine.stats()
    train(engine, (), 3, 6)
    engine.flush()
    engine.save(folder)
    engine.close()
    return told, steps


def test_another_number_of_ranks_goes_on_with_counts_of_rank_0(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(overflown_on_two, str(tmp_path), size=2)
    for told, steps in ranks.run(gone_on_with, str(tmp_path), size=3):
        assert (told["step"], told["dropped_steps"], told["loss_scale"]) == (3, 0, 32.0)
        assert steps == {3.0}


# ---- what does not fit


ON_ONE: dict[str, tuple[tuple[str, ...], str]] = {
    "trains": ((), "train"),
    "scales": (("amp",), "train"),
    "trains locally": (("localsgd",), "train"),
    "flushes a merge": (("gradient_merge",), "flush"),
    "flushes local steps": (("localsgd",), "flush"),
    "loads": ((), "load"),
}


def saved_on_one(rank: int, size: int, case: str, folder: str) -> None:
    fields, call = ON_ONE[case]
    engine = make_engine(fields)
    train(engine, fields, 0, 1 if fields in (("localsgd",), ("gradient_merge",)) else 0)
    if rank == 0:
        engine.save(folder)
    elif call == "train":
        train(engine, fields, 1, 4)
    elif call == "flush":
        engine.flush()
    else:
        engine.load(folder)


@pytest.mark.parametrize("case", ON_ONE)
def test_saving_on_rank_0_only_is_an_error_on_all(case: str, ranks: Pool, tmp_path: Path) -> None:
    ranks.raise_alike(
        "Mismatch", ["engine.save", "every rank"], saved_on_one, case, str(tmp_path), size=2
    )
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_something_else_is_refused_before_anything_changes() -> None:
    engine = make_engine(("dgc",), plain=True)
    before = digest(engine)
    state = make_engine(("gradient_merge",), plain=True).state_dict()
    with pytest.raises(ValueError, match=r"does not fit this engine: strategy\.dgc was nothing"):
        engine.load_state_dict(state)
    with pytest.raises(
        TypeError, match=r"state must be Mapping, got 3 of type int; .*engine\.state_dict\(\)"
    ):
        engine.load_state_dict(3)
    with pytest.raises(ValueError, match="it lacks 'facts'"):
        engine.load_state_dict({"counters": {}})
    assert digest(engine) == before


class FromFirstBatch(torch.nn.Module):
    """A buffer that each rank sets from its first batch, as an observer does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("middle", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.seen:
            self.middle.copy_(x.mean(0))
            self.seen.fill_(True)
        return self.linear(x - self.middle)


def merged_over_a_buffer(rank: int, size: int, folder: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 4, generator=generator) + rank for _ in range(4)]
    found = []
    for loads in (False, True):
        one = engine_of(FromFirstBatch(), gradient_merge=tw.GradientMerge(2))
        if loads:
            one.load(folder)
        else:
            one.train_step(batches[0][:, :3], batches[0][:, 3:])
            one.save(folder)
        for each in batches[1:]:
            one.train_step(each[:, :3], each[:, 3:])
        found.append({k: v.clone() for k, v in one.model.state_dict().items()})
        one.close()
    return found


def test_buffer_changed_by_a_merge_is_equal_after_a_resume(ranks: Pool, tmp_path: Path) -> None:
    (first, resumed), others = ranks.run(merged_over_a_buffer, str(tmp_path))
    for other in (resumed, *others):
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def failing_twice(rank: int, size: int, folder: str) -> list[float]:
    """A hook fails on one rank, all load, and then one rank lacks a gradient in one call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = [rank == 1]

    def hook(*_: Any) -> None:
        if fails[0]:
            fails[0] = False
            raise ValueError("the user's hook")

    optimizer.register_step_post_hook(hook)
    engine = engine_of(model, optimizer=optimizer, gradient_merge=tw.GradientMerge(2))
    engine.save(folder)
    x, y = torch.randn(4, 3) + rank, torch.randn(4, 1)
    for _ in range(2):
        with contextlib.suppress(ValueError):
            engine.train_step(x, y)
    engine.load(folder)
    for _ in range(2):
        loss = model(x).square().mean() if rank == 0 else model[1](torch.ones(1, 2)).sum()
        with contextlib.suppress(tw.errors.Mismatch):
            engine.minimize(loss)
    found = []
    for _ in range(4):
        engine.train_step(x, y)
        found += [engine.step, engine.stats()["microsteps"]]
    return found


def test_ranks_stay_in_step_after_failure_load_and_failure(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(failing_twice, str(tmp_path))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_in_another_type_is_loaded_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    batches = torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(dtype)
        one = engine_of(model, optimizer=torch.optim.NAdam(model.parameters(), lr=0.1))
        if loads:
            one.load(tmp_path)
        for step, each in enumerate(batches[5 if loads else 0 :]):
            if not loads and step == 5:
                one.save(tmp_path)
            one.train_step(each[:, :4], each[:, 4:])
        [state, *_] = one.optimizer.state.values()
        found.append((one.model.weight.detach().clone(), state["mu_product"]))
        one.close()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def codes_and_scales(rank: int, size: int, folder: str, saves: bool) -> list[Tensor]:
    """Each rank has codes of 8 bits, and the scale of its own, for every parameter."""
    engine = make_engine(("localsgd",), plain=True)
    train(engine, ("localsgd",), 0, 6)
    if saves:
        for entries in engine.optimizer.state.values():
            codes = torch.tensor([rank, 1], dtype=torch.uint8)
            entries.update(codes=codes, of={"scale": torch.tensor(3.0 + rank)})
        engine.save(folder)
    else:
        engine.load(folder)
    states = engine.optimizer.state.values()
    return [value for each in states for value in (each["codes"], each["of"]["scale"])]


def test_codes_of_8_bits_keep_scales_on_other_numbers(ranks: Pool, tmp_path: Path) -> None:
    saved = ranks.run(codes_and_scales, str(tmp_path), True, size=2)
    for loaded in ranks.run(codes_and_scales, str(tmp_path), False, size=3):
        torch.testing.assert_close(loaded, saved[0], rtol=0, atol=0)
