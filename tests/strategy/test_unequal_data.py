"""Ranks with unequal numbers of batches, and parameters that only some ranks use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool, Raised
from tests.strategy.training import batch, flat, make_model, prepared

cross_entropy = nn.functional.cross_entropy
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
ALL_SENT = tw.DGC(sparsity=(0.0,), min_numel=1, value_bits=32)


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)


MAKERS = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3),
}

# ---- unequal numbers of batches


def joined(
    rank: int, size: int, counts: list[int], fields: dict[str, Any], maker: str
) -> dict[str, Any]:
    """As many batches as `counts` says for each rank."""
    engine = prepared(make_model(plain=True, **DOUBLE), MAKERS[maker], **fields)
    losses = []
    with engine.join():
        for step in range(counts[rank]):
            losses.append(float(engine.train_step(*batch(step, rank, **DOUBLE))))
    engine.flush()
    again = float(engine.train_step(*batch(99, rank, **DOUBLE)))
    left = 1 if "gradient_merge" in fields else 0
    assert engine.stats()["microsteps"] == left
    assert engine.pending == ("1 merged microsteps" if left else "")
    engine.flush()
    told = engine.step, engine.stats()["microsteps"], engine.pending
    engine.flush()  # nothing is left
    assert (engine.step, 0, "") == told
    return {"params": flat(engine.model), "step": engine.step, "losses": losses, "again": again}


def by_one_process(counts: list[int], merged: int, maker: str) -> list[float]:
    """Ranks that ran out count with a gradient of zero."""
    model = make_model(plain=True, **DOUBLE)
    optimizer = MAKERS[maker](model)
    size, microsteps = len(counts), 0
    optimizer.zero_grad()
    for step in range(max(counts)):
        for part in range(size):
            if step < counts[part]:
                x, y = batch(step, part, **DOUBLE)
                (cross_entropy(model(x), y) / size).backward()
        microsteps += 1
        if microsteps == merged or step == max(counts) - 1:
            for p in model.parameters():
                p.grad /= microsteps
            optimizer.step()
            optimizer.zero_grad()
            microsteps = 0
    for part in range(size):  # once more, and flushed
        x, y = batch(99, part, **DOUBLE)
        (cross_entropy(model(x), y) / size).backward()
    optimizer.step()
    return flat(model)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({}, "sgd"),
    "dense AdamW": ({}, "adamw"),
    "DGCMomentum": ({"dgc": ALL_SENT}, "sgd"),
    "compressor": ({"dgc": ALL_SENT}, "adamw"),
    "merge": ({"gradient_merge": tw.GradientMerge(2)}, "adamw"),
    "merge and DGCMomentum": ({"gradient_merge": tw.GradientMerge(3), "dgc": ALL_SENT}, "sgd"),
}


@pytest.mark.fault("unequal numbers of batches")
@pytest.mark.parametrize("counts", [[6, 3], [2, 5], [4, 4], [0, 3], [1, 4, 2]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_ran_out_count_with_zero(case: str, counts: list[int], ranks: Pool) -> None:
    fields, maker = CASES[case]
    results = ranks.run(joined, counts, fields, maker, size=len(counts))
    merged = fields["gradient_merge"].k_steps if "gradient_merge" in fields else 1
    expected = by_one_process(counts, merged, maker)
    # what travels by dgc is float32; three ranks add up in another order
    most = 1e-6 if "dgc" in fields else 1e-9 if len(counts) == 3 else 1e-12
    for result in results:
        assert result["params"] == results[0]["params"]
        assert result["params"] == pytest.approx(expected, rel=0, abs=most)
        assert result["step"] == results[0]["step"]
    assert [len(result["losses"]) for result in results] == counts


def local_joined(rank: int, size: int, config: str, counts: list[int]) -> tuple[list[float], int]:
    fields: dict[str, Any] = {
        "localsgd": {"localsgd": tw.LocalSGD(4, begin_step=0)},
        "adaptive": {"adaptive_localsgd": tw.AdaptiveLocalSGD(2, max_k_steps=4)},
        "fragments": {"localsgd": tw.LocalSGD(4, begin_step=0, fragments=2, delay=1)},
        "merge": {"localsgd": tw.LocalSGD(2, begin_step=0), "gradient_merge": tw.GradientMerge(2)},
        "residuals": {"dgc": tw.DGC(sparsity=(0.75,), min_numel=64, value_bits=8)},
    }[config]
    engine = prepared(make_model(plain=True, **DOUBLE), sgd, **fields)
    with engine.join():
        for step in range(counts[rank]):
            engine.train_step(*batch(step, rank, **DOUBLE))
    engine.flush()
    return flat(engine.model), engine.step


@pytest.mark.parametrize("counts", [[6, 3], [1, 9], [4, 4], [0, 5]], ids=str)
@pytest.mark.parametrize("config", ["localsgd", "adaptive", "fragments", "merge", "residuals"])
def test_ranks_that_ran_out_equal_the_others(config: str, counts: list[int], ranks: Pool) -> None:
    (first, step), (second, other) = ranks.run(local_joined, config, counts)
    assert first == second
    assert config != "residuals" or step == other == max(counts)


def saved_after(rank: int, size: int, folder: str) -> bool:
    """A checkpoint of an engine whose ranks took unequal numbers of local steps."""
    results = []
    for resumed in (False, True):
        model, config = make_model(plain=True, **DOUBLE), tw.LocalSGD(4, begin_step=0)
        engine = prepared(model, sgd, localsgd=config)
        if resumed:
            engine.load(folder)
        else:
            with engine.join():
                for step in range(6 if rank else 3):
                    engine.train_step(*batch(step, rank, **DOUBLE))
            engine.save(folder)
        for step in range(10, 16):
            engine.train_step(*batch(step, rank, **DOUBLE))
        engine.flush()
        results.append(flat(engine.model))
        engine.close()
    return results[0] == results[1]


def test_an_engine_saves_after_a_join(ranks: Pool, tmp_path: Any) -> None:
    assert ranks.run(saved_after, str(tmp_path)) == [True, True]


@pytest.mark.slow
def test_the_averaged_change_of_local_updates_is_over_all_ranks(ranks: Pool) -> None:
    (got, taken), (_, others) = ranks.run(local_joined, "localsgd", [4, 1])
    assert (taken, others) == (4, 1)
    nets = [make_model(plain=True, **DOUBLE) for _ in range(2)]
    for part, count in enumerate([4, 1]):
        optimizer = sgd(nets[part])
        for step in range(count):
            optimizer.zero_grad()
            x, y = batch(step, part, **DOUBLE)
            cross_entropy(nets[part](x), y).backward()
            optimizer.step()
    mean = torch.tensor([flat(net) for net in nets], **DOUBLE).mean(0)
    assert torch.allclose(torch.tensor(got, **DOUBLE), mean, rtol=0, atol=1e-12)


def mean_asked(rank: int, size: int, others: str) -> None:
    """Rank 1 asks for a mean loss, or joins; rank 0 has no batches left, or is in another call."""
    # eight parameters, whose bits of "absent here" are as long as a number
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    x, y = torch.randn(4, 32), torch.randn(4, 32)
    told = {"find_unused_parameters": others != "a join"}
    engine = prepared(model, sgd, loss=nn.functional.mse_loss, options=told)
    if others == "no batches":
        with engine.join():
            for _ in range(1 + rank):
                engine.train_step(x, y)
            if rank == 1:
                engine.mean_loss(3.0)
    elif rank == 1 and others == "a step":
        engine.mean_loss(3.0)
    elif rank == 1:
        with engine.join():
            engine.train_step(x, y)
    else:
        engine.train_step(x, y)


@pytest.mark.parametrize("others", ["no batches", "a step", "a join"])
def test_a_call_of_some_ranks_only_is_an_error_in_words(ranks: Pool, others: str) -> None:
    ranks.raise_alike("Mismatch", [], mean_asked, others, group_timeout_s=5.0)


def flushed_after(rank: int, size: int, fields: dict[str, Any], counts: list[int]) -> None:
    engine = prepared(**fields)
    for step in range(counts[rank]):
        engine.train_step(*batch(step, rank))
    engine.flush()


@pytest.mark.fault("unequal numbers of batches")
@pytest.mark.parametrize("counts", [[1, 2], [7, 5]], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"dgc": ALL_SENT}, {"gradient_merge": tw.GradientMerge(2)}, {"localsgd": tw.LocalSGD(4)}],
    ids="-".join,
)
def test_a_flush_after_unequal_numbers_of_batches_is_an_error_with_advice_on_all(
    ranks: Pool, fields: dict[str, Any], counts: list[int]
) -> None:
    for raised in ranks.run(flushed_after, fields, counts, expect_errors=True):
        assert isinstance(raised, Raised)
        assert raised.type_name == "Mismatch", raised.traceback
        assert "flush" in raised.text
        assert "engine.join()" in raised.traceback


def failing(rank: int, size: int) -> str:
    engine = prepared()
    with pytest.raises(KeyError), engine.join():
        engine.train_step(*batch(0, rank))
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="is nested"), engine.join(), engine.join():
        pass
    engine.train_step(*batch(1, rank))
    return "went on"


def test_an_error_inside_leaves_the_join_at_once(ranks: Pool) -> None:
    assert ranks.run(failing) == ["went on"] * 2


def scheduled(rank: int, size: int, ours: bool) -> str | int:
    model = make_model(plain=True)
    if ours:
        rate = tw.schedules.CosineDecay(0.0, 0.1, 10)
        optimizer: torch.optim.Optimizer = tw.optim.SGD(model.parameters(), rate)
    else:
        optimizer = sgd(model)
    engine = prepared(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd(model) if ours else optimizer, 10)
    try:
        with engine.join():
            for step in range(4 - 2 * rank):
                engine.train_step(*batch(step, rank))
                if not ours:
                    scheduler.step()
    except tw.errors.Mismatch as error:
        return str(error)
    return engine.step


def test_scheduler_that_a_rank_without_batches_cannot_step_is_reported(ranks: Pool) -> None:
    for told in ranks.run(scheduled, False):
        assert "cannot call scheduler.step()" in told
    assert ranks.run(scheduled, True) == [4, 4]


def staged(rank: int, size: int) -> None:
    with prepared(pipeline=tw.Pipeline(stages=2, micro_batches=2)).join():
        pass


def test_a_pipeline_refuses_it(ranks: Pool) -> None:
    ranks.raise_alike("RuntimeError", "pipeline", staged)


# ---- parameters that only some ranks use


class Branches(nn.Module):
    """Each rank may take another branch; one is taken by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(8, 8, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(8, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        taken: Tensor = self.branches[branch](torch.tanh(self.stem(x)))
        return taken


def branching(rank: int, size: int, fields: dict[str, Any], maker: str, k: int) -> list[float]:
    unused = {"find_unused_parameters": True}
    engine = prepared(Branches(), MAKERS[maker], options=unused, **fields)
    for step in range(6 * k):
        x, y = batch(step, rank, **DOUBLE)
        engine.train_step((x, (step + rank) % 2 if step < 4 * k else 0), y)
    return flat(engine.model)


def branching_alone(size: int, maker: str, k: int) -> list[float]:
    model = Branches()
    optimizer = MAKERS[maker](model)
    for update in range(6):
        optimizer.zero_grad()
        for step in range(k * update, k * update + k):
            for part in range(size):
                x, y = batch(step, part, **DOUBLE)
                outputs = model(x, (step + part) % 2 if step < 4 * k else 0)
                (cross_entropy(outputs, y) / size / k).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("case", CASES)
def test_absent_gradient_is_zero_where_another_rank_has_one(case: str, ranks: Pool) -> None:
    fields, maker = CASES[case]
    k = fields["gradient_merge"].k_steps if "gradient_merge" in fields else 1
    results = ranks.run(branching, fields, maker, k)
    assert results[0] == results[1]
    most = 1e-6 if "dgc" in fields else 1e-12
    assert results[0] == pytest.approx(branching_alone(2, maker, k), rel=0, abs=most)


def narrow(rank: int, size: int) -> tuple[list[float], int]:
    """Gradients that a loss scale makes float32, in a model of bfloat16."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(8, 4, dtype=torch.bfloat16) for _ in range(2))
    amp, unused = tw.AMP("bfloat16", tw.FixedLossScale(4.0)), {"find_unused_parameters": True}
    engine = prepared(model, sgd, options=unused, amp=amp)
    for step in range(2):
        x, y = batch(step, rank)
        engine.minimize(cross_entropy(model[rank](x.bfloat16()).float(), y))
    return flat(model), engine.stats()["bytes_sent"]


def test_absent_gradients_have_the_type_of_present_ones(ranks: Pool) -> None:
    (first, sent), (second, _) = ranks.run(narrow)
    assert first == second
    assert sent > 0


def rows_joined(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    optimizer = tw.optim.LazyAdam(model.parameters(), lr=0.1)
    amp = tw.AMP("bfloat16", tw.DynamicLossScale(init_loss_scale=8.0, scale_window=2))
    engine = prepared(model, optimizer, amp=amp)
    with engine.join():
        for step in range(5 if rank else 2):
            engine.train_step(torch.tensor([[step, 7 - rank]]), torch.tensor([rank]))
    assert engine.step == 5
    return [*flat(model), engine.stats()["loss_scale"]]


def test_row_sparse_gradients_and_a_loss_scale_join_too(ranks: Pool) -> None:
    first, second = ranks.run(rows_joined)
    assert first == second


def rows_here_and_dense_there(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Both ranks look up rows of a table; rank 1 penalises one, densely, in every other step."""

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
        return model, tw.optim.LazyAdam(model.parameters(), lr=0.1)

    def loss_of(model: nn.Sequential, step: int, at: int) -> torch.Tensor:
        found = cross_entropy(model(torch.tensor([[step, 7 - at]])), torch.tensor([at]))
        return found + 0.1 * model[0].weight[3].square().sum() if at == 1 and step % 2 else found

    model, optimizer = make()
    engine = tw.DistributedStrategy().prepare(model, optimizer, digest_every=1)
    whole, plain = make()
    for step in range(5):
        engine.minimize(loss_of(model, step, rank))
        plain.zero_grad()
        (sum(loss_of(whole, step, at) for at in range(size)) / size).backward()
        plain.step()
    return flat(model), flat(whole)


def test_gradient_row_sparse_on_one_rank_only_is_treated_alike_on_all(ranks: Pool) -> None:
    (first, alone), (second, _) = ranks.run(rows_here_and_dense_there)
    assert first == second
    assert first == pytest.approx(alone, abs=1e-6)


class Sometimes(nn.Linear):
    """Leaves itself out when told."""

    left_out = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.left_out else super().forward(x)


def stages_with_unused(rank: int, size: int, complete: bool) -> tuple[str, list[float]]:
    """Two replicas of two stages; a block of each stage is now and then used by one only."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), Sometimes(8, 8), Sometimes(8, 8), nn.Linear(8, 4))
    pipeline, unused = tw.Pipeline(stages=2, micro_batches=2), {"find_unused_parameters": complete}
    engine = prepared(model, sgd, options=unused, pipeline=pipeline)
    text = ""
    for step in range(5):
        for module in engine.model.modules():
            if isinstance(module, Sometimes):
                module.left_out = step == 1 or (step == 2 and rank >= 2)
        try:
            engine.train_step(*batch(step, rank // 2))
        except tw.errors.Mismatch as error:
            text = str(error)
            break
    return text, flat(engine.model)


def test_parameters_of_a_stage_may_be_unused_on_some_replicas_if_asked_for(ranks: Pool) -> None:
    answers = ranks.run(stages_with_unused, True, size=4)
    assert [text for text, _ in answers] == [""] * 4
    stages = {tuple(values) for _, values in answers}
    assert len(stages) == 2
    for text, _ in ranks.run(stages_with_unused, False, size=4):
        assert "find_unused_parameters=True" in text
