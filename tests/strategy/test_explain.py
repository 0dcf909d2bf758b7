"""The text that says what a step does: complete, in order, narrow, and true to model and
optimizer."""

import contextlib
import io
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import rule_of
from tests.ranks import Pool
from tests.strategy.test_config import CONFIGS

COMBINATIONS = [
    tuple(name for name in CONFIGS if name not in (*left_out, "low_rank"))
    for left_out in itertools.product(("lars", "lamb"), ("localsgd", "adaptive_localsgd"))
]


def text_of(capsys: pytest.CaptureFixture[str], *arguments: Any, **fields: Any) -> str:
    """One line, as if the page were endless."""
    text = tw.DistributedStrategy(**fields).explain(*arguments)
    assert capsys.readouterr().out == f"{text}\n"
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()
    return " ".join(text.split())


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))


@pytest.mark.parametrize(
    "fields", [(), *itertools.combinations(CONFIGS, 1), *COMBINATIONS], ids="-".join
)
def test_steps_are_numbered_and_pairs_are_told(
    fields: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(capsys, **{name: CONFIGS[name] for name in fields})
    places = [text.index(f" {number}. ") for number in range(1, 5)]
    assert places == sorted(places)
    for pair in itertools.combinations(fields, 2):
        assert f"{' and '.join(pair)}: {rule_of(*pair).meaning}" in text
    for name in CONFIGS:
        assert (name in text.split("A step")[0]) == any(name in field for field in fields)


def test_nothing_on_is_data_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys)
    assert "nothing: gradients are averaged over all ranks" in text
    assert "the mean over all ranks, dense" in text


def test_the_parts_come_in_the_order_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(
        capsys,
        amp=tw.AMP("float16", tw.DynamicLossScale(2.0**16, 4.0, 77)),
        recompute=tw.Recompute(("blocks.*", "head")),
        gradient_merge=tw.GradientMerge(4, avg=False),
        dgc=tw.DGC(200, 800, (0.75, 0.999), 2.5, 1024, 8),
        lamb=tw.LAMB(0.03, ("*.bias",)),
    )
    parts = [
        "Forward pass of this rank's mini-batch; in float16",
        "modules that match blocks.*, head keep only their inputs",
        "Backward pass of the loss times the loss scale, 65536 at the start",
        "repeat their forward pass",
        "Merge: the gradient, divided by the loss scale, is added",
        "After 4 microsteps their sum is used",
        "All ranks agree whether any gradient overflowed",
        "Exchange between all ranks, by dgc: the first 200 updates dense",
        "25 % from update 201, 0.1 % from 601",
        "8 bits an entry",
        "below 1024 numbers are dense",
        "limited to 2.5 / sqrt(sources)",
        "LAMB instead of the given Adam: weight decay 0.03, without decay: *.bias",
        "New loss scale: divided by 4 after an overflow, but not below 1, times 4 after 77 good "
        "updates",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "others", [{}, {"localsgd": tw.LocalSGD(4)}, {"lars": tw.LARS()}], ids=["", "localsgd", "lars"]
)
def test_the_loss_scale_divides_once(
    others: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for scale in (tw.DynamicLossScale(), tw.FixedLossScale(8.0)):
        fields = {"amp": tw.AMP("float16", scale), **others}
        plain = text_of(capsys, **fields)
        merged = text_of(capsys, **fields, gradient_merge=tw.GradientMerge(2))
        for text in (plain, merged):
            steps = text.partition("Together")[0]
            assert len(re.findall(r"divided? by\s+the\s+(loss\s+)?scale", steps)) == 1, steps


def test_local_updates_exchange_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    config = tw.AdaptiveLocalSGD(
        8,
        begin_step=30,
        max_k_steps=32,
        outer_lr=0.7,
        outer_momentum=0.9,
        outer_nesterov=True,
        fragments=2,
        delay=1,
    )
    text = text_of(capsys, adaptive_localsgd=config, dgc=tw.DGC(10, min_numel=100))
    for part in (
        "No exchange of gradients",
        "after each of the steps 1 to 30, then one part after every 4th step",
        "outer SGD, rate 0.7, momentum 0.9, Nesterov",
        "the first 10 updates dense, then the largest 0.1 % of each tensor's change are sent, 1 "
        "bit an entry",
        "2 parts of the model take turns; the result",
        "takes effect 1 step later",
        "New interval, 1 to 32 steps: 8 at the start",
        "engine.flush(): it applies the last averaging",
    ):
        assert part in text
    assert "Exchange:" not in text
    assert "over all ranks, after step 1, then after every 4th step" in " ".join(
        text_of(capsys, localsgd=tw.LocalSGD(4)).split()
    )
    text = text_of(
        capsys,
        localsgd=tw.LocalSGD(
            4, begin_step=0, compression=tw.Sparse(0.9, 4, 0.5), average_state=True
        ),
    )
    for part in (
        "parameters and optimizer state",
        "after every 4th step; the",
        "largest 10 %",
        "4 bits",
        "counts 0.5 times",
        "mean over the ranks that sent it",
    ):
        assert part in text
    text = text_of(capsys, localsgd=tw.LocalSGD(4, compression=tw.Quantized(1, decay=0.9)))
    assert "is sent in 1 bit; the rounding error is kept and counts 0.9 times" in " ".join(
        text.split()
    )
    text = text_of(capsys, localsgd=tw.LocalSGD(40, begin_step=0, round_seconds=2.5))
    assert "after every 40th step or 2.5 s after the last averaging, whichever comes first" in text
    assert "each rank's change counts by its steps or tokens" in text


@pytest.mark.parametrize(
    ("compression", "options", "part"),
    [
        (
            tw.Sparse(0.97, mean_over="all"),
            {},
            "about 38 % or more of a recurring change is applied, since the residual decays. At "
            "most outer_lr=2.62 compensates",
        ),
        (tw.Sparse(0.9, mean_over="all"), {}, "about 69 % or more of a recurring"),
        (tw.Sparse(0.9, mean_over="all"), {"outer_lr": 1.2}, "At most outer_lr=1.45 compensates"),
        (tw.Sparse(0.9, mean_over="all"), {"outer_lr": 1.5}, None),
        (
            tw.Sparse(0.97, mean_over="all"),
            {"outer_lr": 0.7, "outer_momentum": 0.9},
            "At most 2.62 times the outer_lr of dense changes compensates for it; at decay=1",
        ),
        (tw.Sparse(0.5, mean_over="all"), {}, None),
        (tw.Sparse(0.97, decay=1.0, mean_over="all"), {}, None),
        (tw.Sparse(0.999, decay=0.0, mean_over="all"), {}, "about 0.1 % or more of a recurring"),
        (tw.Sparse(0.999, decay=0.0, mean_over="all"), {}, "At most outer_lr=1000 compensates"),
        (tw.Sparse(0.97), {}, "depends on the ranks' messages"),
        (tw.Quantized(4), {}, None),
        (tw.Quantized(1, decay=0.5), {}, "depends on the ranks' messages"),
        (tw.LowRank(), {}, None),
        (None, {}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["localsgd", "adaptive_localsgd"])
def test_the_share_that_is_applied_and_its_outer_rate_are_told(
    capsys: pytest.CaptureFixture[str],
    field: str,
    compression: Any,
    options: dict[str, Any],
    part: str | None,
) -> None:
    kind = tw.LocalSGD if field == "localsgd" else tw.AdaptiveLocalSGD
    text = text_of(capsys, **{field: kind(8, compression=compression, **options)})
    assert part is None or part in text
    told_by_a_run = part is not None and "outer_momentum" not in options
    assert ("applied_share" in text) == told_by_a_run


def test_a_pipeline_says_how_ranks_and_batches_must_divide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = text_of(capsys, pipeline=tw.Pipeline(3, 5, "gpipe", ("a", "b")))
    for part in (
        "5 equal parts",
        "3 stages",
        "which begin at a, b",
        "gpipe",
        "multiple of 3",
        "divisible by 5",
        "replicas of a stage",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"amp": tw.AMP("float16")}, "float16 without a loss scale"),
        ({"amp": tw.AMP("bfloat16", tw.FixedLossScale())}, "bfloat16 has the range of float32"),
        ({"amp": tw.AMP("float16", tw.FixedLossScale(8.0, False))}, "drop_overflow_update=False"),
        ({"gradient_merge": tw.GradientMerge(1)}, "k_steps=1 merges nothing"),
        ({"localsgd": tw.LocalSGD(1)}, "k_steps=1 averages after every step"),
        ({"pipeline": tw.Pipeline(1, 2)}, "one stage is no pipeline"),
        ({"gradient_merge": tw.GradientMerge(2)}, "the leftovers of a merge"),
        ({"dgc": tw.DGC()}, "LOCAL_WORLD_SIZE"),
        ({"dgc": tw.DGC()}, "exchange='auto'"),
        ({"dgc": tw.DGC(node_size=1, exchange="gather")}, "every rank is a source of its own"),
        (
            {"dgc": tw.DGC(node_size=1, exchange="gather")},
            "bytes grow with sources (exchange='gather')",
        ),
        ({"dgc": tw.DGC(node_size=4)}, "ranks must be a multiple of 4"),
        (
            {"dgc": tw.DGC(node_size=4), "pipeline": tw.Pipeline(2, 2)},
            "replicas of a stage must be a multiple of 4",
        ),
        ({"dgc": tw.DGC(exchange="split")}, "adds up a share of the numbers"),
        (
            {"dgc": tw.DGC(node_size=4), "localsgd": tw.LocalSGD(2)},
            "is for gradients; set node_size of the local updates",
        ),
        (
            {"localsgd": tw.LocalSGD(2, node_size=4)},
            "the 4 ranks of a node average densely first and count as one",
        ),
    ],
    ids=str,
)
def test_remarks(fields: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in text_of(capsys, **fields)


def test_with_a_model_dense_tensors_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    model[3].bias.requires_grad_(False)
    text = text_of(capsys, model, dgc=tw.DGC(min_numel=6000))
    assert "compressed, the gradient of 294,912 numbers in 2 tensors: 0.weight, 2.weight" in text
    assert (
        "dense, below min_numel=6000, the gradient of 6,144 numbers in 3 tensors: 0.bias, 2.bias, "
        "3.weight" in text
    )
    assert "not trained: 1 tensor: 3.bias" in text
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64))
    assert "dense, because of torch.complex64" in text_of(capsys, model, dgc=tw.DGC(min_numel=1))
    rows = nn.Sequential(nn.Embedding(100, 8, sparse=True))
    assert "dense, because its rows are sparse already, the gradient of 800" in text_of(
        capsys, rows, dgc=tw.DGC(min_numel=9)
    )
    local = text_of(capsys, rows, dgc=tw.DGC(min_numel=9), localsgd=tw.LocalSGD(2))
    assert "compressed, the change of 800 numbers" in local
    assert "dense, the gradient of 72 numbers in 2 tensors" in text_of(capsys, model)
    compressed = tw.LocalSGD(2, compression=tw.Sparse(0.5))
    assert "compressed, the change of 72 numbers" in text_of(capsys, model, localsgd=compressed)
    # 64 and 8 complex numbers: a header of 32 bytes, 8 scales a tensor, half a byte an entry
    told = text_of(capsys, model, localsgd=tw.LocalSGD(2, compression=tw.Quantized(4)))
    assert f"the message has {32 + 2 * 32 + 64 + 8} bytes" in " ".join(told.split())


def test_with_a_model_the_message_and_the_choice_of_exchange_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 500))
    assert "1,500 entries in 2,471 bytes; sources gather below 10" in text_of(
        capsys, model, dgc=tw.DGC()
    )
    told = text_of(capsys, model, dgc=tw.DGC(exchange="split"))
    assert "in 2,471 bytes" in told and "below 10" not in told


def test_on_ranks_the_sources_are_told(ranks: Pool) -> None:
    for texts in ranks.run(explained, size=4):
        assert "Here there are 2 sources of 2 ranks: node_size=2 was given" in texts[0]
        assert "Here there are 4 sources of 1 rank: LOCAL_WORLD_SIZE" in texts[1]
        assert "But node_size=3 does not divide the 4 ranks" in texts[2]


def explained(rank: int, size: int) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        texts = [tw.DistributedStrategy(dgc=tw.DGC(node_size=n)).explain() for n in (2, None, 3)]
    return [" ".join(text.split()) for text in texts]


def test_with_a_model_stages_and_recomputed_modules_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {
        "pipeline": tw.Pipeline(2, 2, split_points=("2",)),
        "recompute": tw.Recompute(("[02]",)),
    }
    text = text_of(capsys, small_model(), **fields)
    assert "stage 1: 33,280 numbers in 2 tensors: 0.weight, 0.bias" in text
    assert "stage 2: 267,786 numbers in 4 tensors" in text
    assert "recomputed: 2 modules: 0, 2" in text
    with pytest.raises(ValueError, match="blocks"):
        tw.DistributedStrategy(recompute=tw.Recompute(("blocks.*",))).explain(small_model())


def test_long_lists_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    assert (
        "20 tensors: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias and 14 more"
        in text_of(capsys, model)
    )


def test_with_an_optimizer_it_says_what_is_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.25, momentum=0.875)
    before = repr(sgd)
    for arguments in ((model, sgd), (None, sgd)):
        text = text_of(capsys, *arguments, dgc=tw.DGC()).split("This optimizer")[1]
        assert "dgc compresses gradients with the momentum" in text
        text = text_of(capsys, *arguments, lars=tw.LARS()).split("This optimizer")[1]
        for part in ("Lars", "0.25", "0.875"):
            assert part in text
    assert repr(sgd) == before
    assert sgd.param_groups[0]["params"] == list(model.parameters())


def test_an_optimizer_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    adam = torch.optim.Adam(model.named_parameters())
    with pytest.raises(tw.StrategyError, match="lars"):
        tw.DistributedStrategy(lars=tw.LARS()).explain(model, adam)
    with pytest.raises(TypeError, match=r"optimizer must be Optimizer.*got 3"):
        tw.DistributedStrategy().explain(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be Module.*got 'model'"):
        tw.DistributedStrategy().explain("model")  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
