"""`stats()` has one set of flat names, numbers only; the log says what is slow or matters."""

import logging
import math
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.laws.frontends import AttachedStep, Case, LocalBlock, OwnStep, WithEngine
from tests.processes import ran_code
from tests.ranks import Pool, say, wait_for_word
from tests.strategy.training import FIELDS, batch, make_engine
from tests.toys import engine_of, warned

NAMES = {
    *("step", "microsteps", "dropped_steps", "averagings", "k_steps", "sparsity", "loss_scale"),
    *("applied_share", "bytes_sent", "bytes_received", "bytes_between_nodes"),
    *("bytes_between_stages", "bytes_dense", "ratio", "wait_s", "rate_bit_s", "waiting_share"),
    *("goodput", "lost_waiting", "lost_regrouping", "lost_joining", "lost_saving", "grad_norm"),
    *("clipped_share", "drift", "error_norm", "joining_bytes", "joining_total_bytes"),
    *("joining_bit_s", "joining_left_s", "merge_steps", "batch_share", "published_step"),
}


def require_flat(stats: dict[str, Any]) -> None:
    assert set(stats) == NAMES
    for name, value in stats.items():
        assert isinstance(value, Real), name
        assert not isinstance(value, bool), name
    assert stats["ratio"] == (
        stats["bytes_dense"] / stats["bytes_sent"] if stats["bytes_sent"] else math.inf
    )


@pytest.mark.parametrize("field", [None, *(name for name in FIELDS if name != "pipeline")])
def test_an_engine_has_the_names(field: str | None) -> None:
    engine = make_engine(() if field is None else (field,), plain=True)
    require_flat(engine.stats())
    for step in range(3):
        engine.train_step(*batch(step, 0))
    require_flat(engine.stats())
    assert isinstance(engine.pending, str)
    ratios = engine.trust_ratios()
    assert bool(ratios) == (field in ("lars", "lamb"))


def everywhere(rank: int, size: int) -> list[dict[str, Any]]:
    found = []
    sparse = tw.LocalSGD(2, compression=tw.Sparse(0.5))
    for way in (WithEngine, LocalBlock, OwnStep, AttachedStep):
        trainer = way(Case(local=sparse))
        source = next(getattr(trainer, n) for n in SOURCES if hasattr(trainer, n))
        for step in range(4):
            trainer.train(rank, step, step + 1)
            found.append(source.stats())
        assert tw.log_stats(source, lambda *_: None).keys() == {f"thinwire/{n}" for n in NAMES}
        assert source.stats() == trainer.stats() | {"dropped_steps": 0}
        trainer.end()
    return found


SOURCES = ("handle", "engine", "sync", "optimizer")
"""Whom one asks: what has a handle or local updates has an optimizer too."""


def test_local_updates_an_optimizer_and_its_handle_have_the_names_too(ranks: Pool) -> None:
    for found in ranks.run(everywhere):
        for stats in found:
            require_flat(stats)
        engine, local, own, attached = (found[at : at + 4] for at in range(0, 16, 4))
        for each in (engine, own, attached):
            assert [stats["sparsity"] for stats in each] == [0.0, 0.75, 0.75, 0.75]
        assert local[-1]["sparsity"] == 0.5
        assert local[-1]["averagings"] == 2
        for each in (engine, local, own, attached):
            assert each[-1]["bytes_received"] > 0
            assert each[-1]["wait_s"] > 0


class Adapted(nn.Module):
    """A frozen matrix with two adapters, each below the default of `min_numel`."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(768, 768).requires_grad_(False)
        self.down, self.up = nn.Linear(768, 8, bias=False), nn.Linear(8, 768, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) + self.up(self.down(x))


class Trained(NamedTuple):
    """What a test of adapters looks at: who counts, and one step."""

    stats: Callable[[], dict[str, float]]
    step: Callable[[], Any]
    close: Callable[[], Any]


def adapted(way: str, **options: Any) -> Trained:
    torch.manual_seed(0)
    model = Adapted()
    params = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(params, lr=1e-3)
    x = torch.randn(4, 768)
    if way in ("local", "alone"):
        optimizer = adam if way == "local" else tw.optim.DGCMomentum(params, 1e-3, **options)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()

        if way == "alone":
            return Trained(optimizer.stats, step, lambda: None)
        config = tw.LocalSGD(2, compression=tw.LowRank(**options))
        sync = tw.local_sgd(model, adam, config).__enter__()
        return Trained(sync.stats, step, sync.close)
    fields: dict[str, Any] = {"localsgd": tw.LocalSGD(2)} if way == "dgc, localsgd" else {}
    fields |= {"low_rank": tw.LowRank(**options)} if way == "low_rank" else {}
    fields |= {"dgc": tw.DGC(**options)} if way.startswith("dgc") else {}
    optimizer = None if way == "dgc of SGD" else adam
    engine = engine_of(model, lambda out, _: out.square().mean(), optimizer=optimizer, **fields)
    return Trained(engine.stats, lambda: engine.train_step(x, x), engine.close)


@pytest.mark.parametrize(
    "way", ["dgc", "dgc of SGD", "dgc, localsgd", "low_rank", "local", "alone"]
)
def test_adapters_too_small_to_be_compressed_are_reported_with_a_remedy(way: str) -> None:
    told = r"compresses 0 of 12,288 trainable numbers \(0 %\).*min_numel=6144 .* compress 12,288"
    with pytest.warns(UserWarning, match=told):
        made = adapted(way)
        made.step()
    assert made.stats()["sparsity"] == 0
    made.close()
    made = adapted(way, min_numel=6144)  # without a word
    made.step()
    assert (made.stats()["sparsity"] > 0) == (way not in ("low_rank", "local"))
    made.close()


def test_where_no_smaller_tensor_helps_the_reason_is_reported() -> None:
    with pytest.warns(UserWarning, match="0 of 12,288 .* because rank=8 is not below its smaller"):
        adapted("low_rank", rank=8).close()


def words(rank: int, size: int) -> list[str]:
    with warned() as texts:
        adapted("dgc").close()
    return texts


def test_one_rank_tells_it(ranks: Pool) -> None:
    first, *others = ranks.run(words)
    assert ["compresses 0 of" in word for word in first] == [True]
    assert not any(others)


def late(rank: int, size: int, field: str) -> tuple[float, float, float]:
    """Seconds that count as waiting, those of the two steps themselves, and what came."""
    engine = make_engine((field,) if field else (), plain=True)
    for step in range(4):
        engine.train_step(*batch(step, rank))
    before = engine.stats()["wait_s"]
    if rank:
        wait_for_word("begun")
        time.sleep(1.5)
    else:
        say("begun")
    begun = time.perf_counter()
    for step in range(4, 6):
        engine.train_step(*batch(step, rank))
    whole_s = time.perf_counter() - begun
    return engine.stats()["wait_s"] - before, whole_s, engine.stats()["bytes_received"]


@pytest.mark.parametrize("field", ["", "dgc", "localsgd"])
def test_the_time_of_waiting_is_that_for_the_others(field: str, ranks: Pool) -> None:
    (early_s, whole_s, got), (late_s, late_whole_s, _) = ranks.run(late, field)
    assert whole_s / 4 < early_s <= whole_s
    assert 0 <= late_s <= late_whole_s
    assert got > 0


def test_bytes_received_count_arrivals(ranks: Pool) -> None:
    """Dense gradients as a whole, and agreements."""
    (stats, *_) = ranks.run(dense)
    whole = stats["bytes_dense"]
    assert whole < stats["bytes_received"] < whole + 2000


def dense(rank: int, size: int) -> dict[str, Any]:
    engine = make_engine((), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, rank))
    return dict(engine.stats())


# ---- the log


def test_without_a_set_up_of_logging_warnings_alone_are_printed() -> None:
    code = "import logging, thinwire; log = logging.getLogger('thinwire'); "
    done = ran_code(code + "log.info('nobody asked'); log.warning('a member was lost')")
    assert (done.stdout, done.stderr) == ("", "a member was lost\n")


def logged(rank: int, size: int) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    log, handler = logging.getLogger("thinwire"), Kept()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        fields = ("localsgd",)
        engine = make_engine(fields, plain=True)
        for step in range(4):
            engine.train_step(*batch(step, rank))
        engine.close()
        engine = make_engine(("amp",), plain=True)
        x, y = batch(0, rank)
        engine.train_step(x * float("inf"), y)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return records


def test_log_has_the_main_events(ranks: Pool) -> None:
    for records in ranks.run(logged):
        text = "\n".join(f"{level} {message}" for level, message in records)
        assert "INFO the engine is ready" in text
        assert "DEBUG averaged after local step 3" in text
        assert "INFO step 0 was dropped for an overflow" in text
        assert "loss scale" in text


def of_norms(rank: int, size: int) -> list[dict[str, float]]:
    found = []
    for localsgd in (None, tw.LocalSGD(2), tw.LocalSGD(2, compression=tw.Quantized(1))):
        torch.manual_seed(0)
        model = nn.Linear(64, 32, bias=False)
        strategy = tw.DistributedStrategy(localsgd=localsgd)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clip = tw.ClipByGlobalNorm(3.0)
        engine = strategy.prepare(model, optimizer, grad_clip=clip)
        for step in range(2):
            # gradients of norm 4 that share half of their squares between ranks, then of norm 2
            given = torch.zeros(32, 64)
            given[0, 0] = given[1, rank] = (4.0, 2.0)[step] / math.sqrt(2)
            engine.minimize((model.weight * given).sum())
        found.append(engine.stats())
        state = engine.state_dict()["exchange"]
        errors = state.get("residuals", {}).values()
        found[-1]["of state"] = math.hypot(0.0, *(float(e.norm()) for e in errors))
    return found


def test_statistics_have_norms_of_gradients_changes_and_residuals(ranks: Pool) -> None:
    for dense, local, bit in ranks.run(of_norms):
        # mean over two ranks: half of the part in which they differ
        assert dense["grad_norm"] == pytest.approx(math.sqrt(3))
        assert local["grad_norm"] == bit["grad_norm"] == pytest.approx(2)
        assert {stats["clipped_share"] for stats in (dense, local, bit)} == {0.5}
        assert dense["drift"] == dense["error_norm"] == local["error_norm"] == 0
        assert local["drift"] == pytest.approx(math.sqrt(4 / 3))
        assert 1 <= bit["drift"] <= 1.42
        assert bit["error_norm"] == pytest.approx(bit["of state"])
        assert bit["error_norm"] > 0
