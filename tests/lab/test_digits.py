"""The convolutional net on digits: data, batch statistics, and whole comparisons."""

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from tests import api
from tests.api import page_render as render
from tests.lab.configs import config
from tests.lab.test_compare import compared
from tests.ranks import Pool

RECORD = 65


def records(part: bytes) -> list[bytes]:
    assert len(part) % RECORD == 0
    return [part[i : i + RECORD] for i in range(0, len(part), RECORD)]


def run_config(folder: Path, **fields: Any) -> api.RunConfig:
    files = api.comparison._write_corpus(api.read_digits(), folder, tune=False)
    return config(model=api.ConvolutionSize(4), batch=6, **files, **fields)


def test_parts_are_fixed_and_have_every_digit_once() -> None:
    found = api.read_digits()
    assert found == api.read_digits()
    parts = [records(part) for part in (found.train, found.validation, found.held_out)]
    assert [len(part) for part in parts] == [1285, 256, 256]
    digits = load_digits()
    whole = [
        bytes([*image.astype("uint8").ravel().tolist(), int(digit)])
        for image, digit in zip(digits.images, digits.target, strict=True)
    ]
    assert Counter(record for part in parts for record in part) == Counter(whole)
    assert parts[2] == whole[6::7]
    for part in parts:  # every class has its share
        counts = Counter(record[-1] for record in part)
        assert len(counts) == 10
        assert min(counts.values()) > len(part) / 10 * 0.6


@pytest.mark.parametrize(
    ("size", "wanted"), [("tiny", 1e5), ("small", 9e5), ("medium", 3.3e6), ("60k", 6e4)]
)
def test_sizes_mean_as_many_parameters_as_for_the_transformer(size: str, wanted: float) -> None:
    shape = api.size_of("convolution", size)
    assert isinstance(shape, api.ConvolutionSize)
    parameters = sum(p.numel() for p in api.ConvolutionalNet(shape).parameters())
    assert 0.85 * wanted < parameters < 1.15 * wanted
    assert 0.85 * parameters < shape.about_parameters < parameters


def drawn(rank: int, size: int, run: api.RunConfig) -> tuple[list[list[int]], float, list[Any]]:
    """Classes of two batches, the loss of evaluation, and the first image with its class."""
    work = api.work_of(run)
    batches = [work.next_batch() for _ in range(2)]
    images, classes = batches[0]
    assert images.shape == (run.batch, 1, 8, 8)
    assert 0 <= images.min() <= images.max() <= 1
    first = [*(16 * images[0]).int().flatten().tolist(), int(classes[0])]
    return [targets.tolist() for _, targets in batches], work.evaluate(work.model), first


@pytest.mark.slow
def test_ranks_draw_their_own_digits_and_evaluate_together(ranks: Pool, tmp_path: Path) -> None:
    run = run_config(tmp_path)
    one, other = ranks.run(drawn, run, size=2)
    assert [one, other] == ranks.run(drawn, run, size=2)
    another = api.RunConfig.from_dict({**asdict(run), "seed": 1})
    assert one[0] != other[0] != ranks.run(drawn, another, size=2)[1][0]
    assert bytes(one[2]) in records(api.read_digits().train)
    # the whole held-out part, once, in one batch
    held_out = torch.frombuffer(bytearray(api.read_digits().held_out), dtype=torch.uint8)
    held_out = held_out.view(-1, RECORD)
    torch.manual_seed(run.seed)
    model = api.ConvolutionalNet(api.ConvolutionSize(4)).eval()
    logits = model(held_out[:, :64].float().view(-1, 1, 8, 8) / 16)
    expected = torch.nn.functional.cross_entropy(logits, held_out[:, 64].long())
    assert one[1] == other[1] == pytest.approx(expected.item(), rel=1e-5)


def test_muon_trains_the_kernels_of_the_net_as_matrices() -> None:
    model = api.ConvolutionalNet(api.ConvolutionSize(4))
    hidden, rest = api.Setup("muon").optimizer_of(model).param_groups
    kernels = {id(p) for p in model.features.parameters() if p.ndim == 4}
    assert hidden["muon"] and hidden["conv"]
    assert kernels <= {id(p) for p in hidden["params"]}
    assert not rest["muon"]


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_it_learns_its_digits_under_every_kind_of_strategy(tmp_path: Path) -> None:
    names = ["dense", "dgc", "low-rank", "quantized-local"]
    results = compared(tmp_path, strategies=names, model="convolution", steps=48, batch=8)
    starts = {run.evaluations[0].loss for run in results.strategies}
    assert len(starts) == 1
    for run in results.strategies:
        assert run.final_loss < 0.7 * run.evaluations[0].loss, run.strategy
    model = {"kind": "convolution", "width": 28, "parameters": results.strategies[0].parameters}
    assert results.model == model
    assert results.text["source"] == "the 1,797 scanned digits of scikit-learn"
    assert {"--model convolution", "--size tiny"} <= {*re.findall(r"--\w+ \w+", results.command)}
    page = render(results)
    assert "held-out loss, nats<" in page
    assert "nats per byte" not in page
