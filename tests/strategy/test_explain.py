"""The text that says what a step does: complete, in order, narrow, true to model and optimizer."""

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import rule_of
from tests.ranks import Pool
from tests.strategy.test_config import CONFIGS

COMBINATIONS = [
    tuple(name for name in CONFIGS if name not in (*left_out, "low_rank", "compression"))
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
def test_explain_fields_on_are_numbered_in_order_with_their_pairs(
    fields: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(capsys, **{name: CONFIGS[name] for name in fields})
    places = [text.index(f" {number}. ") for number in range(1, 5)]
    assert places == sorted(places)
    for pair in itertools.combinations(fields, 2):
        assert f"{' and '.join(pair)}: {rule_of(*pair).meaning}" in text
    for name in CONFIGS:
        assert (f" {name}: " in text.split("A step")[0]) == (name in fields)


def test_explain_nothing_on_is_data_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys)
    assert "nothing: gradients are averaged over all ranks" in text
    assert "the mean over all ranks, dense" in text


def test_explain_all_parts_follow_the_order_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(
        capsys,
        amp=tw.AMP("float16", tw.DynamicLossScale(2.0**16, 4.0, 77)),
        recompute=tw.Recompute(("blocks.*", "head")),
        gradient_merge=tw.GradientMerge(4, avg=False),
        dgc=tw.DGC(200, 800, (0.75, 0.999), 2.5, 1024, 8),
        lamb=tw.LAMB(0.03, ("*.bias",)),
    )
    for value in ("65536", "'blocks.*', 'head'", "200", "0.75, 0.999", "2.5", "0.03", "'*.bias'"):
        assert value in text.split("A step")[0]
    parts = [
        *("in float16", "keep only their inputs", "times the loss scale", "repeat their forward"),
        *("Merge: the gradient, divided by the loss scale", "After 4 microsteps their sum"),
        *("All ranks agree", "over all ranks, by dgc", "then LAMB", "New loss scale"),
    ]
    order = text.split("A step")[1]
    indices = [order.index(part) for part in parts]
    assert indices == sorted(indices)


def test_explain_local_updates_exchange_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    config = tw.AdaptiveLocalSGD(8, begin_step=30, max_k_steps=32, fragments=2, delay=1)
    text = text_of(capsys, adaptive_localsgd=config, dgc=tw.DGC(10, min_numel=100))
    for part in (
        "No exchange of gradients",
        "the first 30 steps, then one of 2 parts every 4 steps; it takes effect 1 steps later",
        "New interval",
        "engine.flush(): it applies the last averaging",
    ):
        assert part in text
    assert "Exchange:" not in text
    text = text_of(capsys, localsgd=tw.LocalSGD(40, begin_step=0, round_seconds=2.5))
    assert "over all ranks, every 40 steps or 2.5 s" in text


@pytest.mark.parametrize(
    ("compression", "options", "part"),
    [
        (
            tw.Sparse(0.97, mean_over="all"),
            {},
            "about 38 % or more of a recurring change is applied, since the residual decays. At "
            "most outer_lr=2.62 compensates",
        ),
        (tw.Sparse(0.9, mean_over="all"), {"outer_lr": 1.2}, "At most outer_lr=1.45 compensates"),
        (
            tw.Sparse(0.97, mean_over="all"),
            {"outer_lr": 0.7, "outer_momentum": 0.9},
            "At most 2.62 times the outer_lr of dense changes compensates for it; at decay=1",
        ),
        (tw.Sparse(0.5, mean_over="all"), {}, None),
        (tw.Sparse(0.999, decay=0.0, mean_over="all"), {}, "At most outer_lr=1000 compensates"),
        (tw.Sparse(0.97), {}, "depends on the ranks' messages"),
        (tw.Quantized(1, decay=0.5), {}, "depends on the ranks' messages"),
        (None, {}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["localsgd", "adaptive_localsgd"])
def test_explain_compression_of_changes_names_applied_share_and_outer_rate(
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


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"pipeline": tw.Pipeline(3, 5, "gpipe", ("a", "b"))}, "5 parts through 3 stages"),
        ({"pipeline": tw.Pipeline(3, 5)}, "multiple of 3, every mini-batch of 5"),
        ({"amp": tw.AMP("float16")}, "float16 without a loss scale"),
        ({"amp": tw.AMP("bfloat16", tw.FixedLossScale())}, "bfloat16 has the range of float32"),
        ({"amp": tw.AMP("float16", tw.FixedLossScale(8.0, False))}, "drop_overflow_update=False"),
        ({"gradient_merge": tw.GradientMerge(1)}, "gradient_merge: k_steps=1"),
        ({"localsgd": tw.LocalSGD(1)}, "localsgd: k_steps=1"),
        ({"gradient_merge": tw.GradientMerge(2)}, "the leftovers of a merge"),
        ({"dgc": tw.DGC()}, "LOCAL_WORLD_SIZE"),
        ({"dgc": tw.DGC()}, "exchange='auto'"),
        ({"dgc": tw.DGC(node_size=4, exchange="gather")}, "node_size=4"),
        ({"dgc": tw.DGC(exchange="split")}, "adds up a share of the numbers"),
        ({"dgc": tw.DGC(node_size=4), "localsgd": tw.LocalSGD(2)}, "node_size is for gradients"),
    ],
    ids=str,
)
def test_explain_setting_with_an_effect_to_know_is_named(
    fields: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in text_of(capsys, **fields)


def test_explain_model_dense_tensors_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert f"a message has {32 + 2 * 32 + 64 + 8} bytes" in " ".join(told.split())


def test_explain_model_names_message_and_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 500))
    assert "1,500 entries in 2,471 bytes; sources gather below 10" in text_of(
        capsys, model, dgc=tw.DGC()
    )
    told = text_of(capsys, model, dgc=tw.DGC(exchange="split"))
    assert "in 2,471 bytes" in told and "below 10" not in told


def test_explain_several_ranks_names_sources(ranks: Pool) -> None:
    for texts in ranks.run(explained, size=4):
        assert "Here there are 2 sources of 2: node_size=2 was given" in texts[0]
        assert "Here there are 4 sources of 1: LOCAL_WORLD_SIZE" in texts[1]
        assert "But node_size=3 does not divide the 4 ranks" in texts[2]


def explained(rank: int, size: int) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        texts = [tw.DistributedStrategy(dgc=tw.DGC(node_size=n)).explain() for n in (2, None, 3)]
    return [" ".join(text.split()) for text in texts]


def test_explain_model_names_stages_and_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_explain_optimizer_names_settings_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
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
