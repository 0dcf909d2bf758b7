"""Dictionaries and YAML files: there and back without loss, every mistake named with its line."""

import ast
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.api import text_of
from tests.strategy.test_config import CONFIGS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "strategies").glob("*.yaml"))

fractions = st.floats(0, 1, exclude_max=True)
positive = st.floats(1e-30, 1e30)
non_negative = st.floats(0, 1e30)
counts = st.integers(1, 10**12)
bits = st.sampled_from([1, 2, 4, 8, 16, 32])
patterns = st.lists(st.text(), max_size=3).map(tuple)
loss_scales = st.one_of(
    st.builds(tw.FixedLossScale, st.floats(1, 1e38), st.booleans()),
    st.builds(
        tw.DynamicLossScale, st.floats(1, 1e38), st.floats(1.0, 1e30, exclude_min=True), counts
    ),
)


compressions = st.one_of(
    st.builds(tw.Sparse, fractions, bits, fractions, st.sampled_from(["senders", "all"])),
    st.builds(tw.Quantized, st.sampled_from([1, 2, 4, 8, 16]), fractions),
)


@st.composite
def local_updates(draw: st.DrawFn, kind: Callable[..., Any]) -> Any:
    k_steps = draw(st.integers(1, 1000))
    fragments = draw(st.integers(1, k_steps))
    momentum = draw(fractions)
    return kind(
        k_steps,
        begin_step=draw(st.integers(0, 1000)),
        **(
            {"max_k_steps": draw(st.integers(k_steps, 2000))} if kind is tw.AdaptiveLocalSGD else {}
        ),
        outer_lr=draw(positive),
        outer_momentum=momentum,
        outer_nesterov=momentum > 0 and draw(st.booleans()),
        compression=draw(st.none() | compressions),
        fragments=fragments,
        delay=draw(st.integers(0, k_steps // fragments - 1)),
        average_state=draw(st.booleans()),
        node_size=draw(st.none() | counts),
    )


@st.composite
def pipelines(draw: st.DrawFn) -> tw.Pipeline:
    points = draw(st.lists(st.text(), unique=True, max_size=3))
    stages = len(points) + 1 if points else draw(counts)
    return tw.Pipeline(
        stages, draw(counts), draw(st.sampled_from(["1f1b", "gpipe"])), tuple(points)
    )


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "amp": st.builds(tw.AMP, st.sampled_from(["bfloat16", "float16"]), st.none() | loss_scales),
    "recompute": st.builds(tw.Recompute, st.lists(st.text(), min_size=1, max_size=3).map(tuple)),
    "pipeline": pipelines(),
    "gradient_merge": st.builds(tw.GradientMerge, counts, st.booleans()),
    "dgc": st.builds(
        tw.DGC,
        st.integers(0, 1000),
        counts,
        st.lists(fractions, min_size=1, max_size=5).map(tuple),
        st.none() | positive,
        counts,
        bits,
    ),
    "lars": st.builds(tw.LARS, positive, non_negative, non_negative, patterns),
    "lamb": st.builds(tw.LAMB, non_negative, patterns),
    "localsgd": local_updates(tw.LocalSGD),
    "adaptive_localsgd": local_updates(tw.AdaptiveLocalSGD),
}


@st.composite
def strategies(draw: st.DrawFn) -> tw.DistributedStrategy:
    chosen = draw(st.sets(st.sampled_from(list(KINDS))))
    chosen -= {
        draw(st.sampled_from(["lars", "lamb"])),
        draw(st.sampled_from(["localsgd", "adaptive_localsgd"])),
    }
    values = {name: draw(KINDS[name]) for name in chosen}
    if any(getattr(value, "compression", None) is not None for value in values.values()):
        values.pop("dgc", None)
    return tw.DistributedStrategy(**values)


def is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and is_plain(entry) for key, entry in value.items())
    if type(value) is list:
        return all(is_plain(entry) for entry in value)
    return type(value) in (str, int, float, bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@settings(max_examples=60, deadline=None)
@given(strategy=strategies())
def test_strategy_through_a_file_is_equal(folder: Path, strategy: tw.DistributedStrategy) -> None:
    path, document = folder / "strategy.yaml", strategy.to_dict()
    assert is_plain(document)
    assert tw.DistributedStrategy.from_dict(json.loads(json.dumps(document))) == strategy
    strategy.save(path)
    assert tw.DistributedStrategy.load(path) == strategy
    # for YAML 1.1 as well
    assert (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) == document


def test_amp_torch_dtype_is_kept_by_name() -> None:
    strategy = tw.DistributedStrategy(amp=tw.AMP(torch.bfloat16))
    assert strategy == tw.DistributedStrategy(amp=tw.AMP("bfloat16"))
    assert strategy.to_dict()["amp"]["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="'float32'"):
        tw.AMP(torch.float32)
    with pytest.raises(TypeError, match=r"dtype.*\b16\b.*bfloat16"):
        tw.AMP(16)  # type: ignore[arg-type]


def test_document_ints_pass_for_floats_and_null_for_none() -> None:
    document = {
        "dgc": {"sparsity": [0], "local_grad_clip_norm": None},
        "lars": None,
        "localsgd": {"k_steps": 2},
    }
    expected = tw.DistributedStrategy(dgc=tw.DGC(sparsity=(0.0,)), localsgd=tw.LocalSGD(2))
    assert tw.DistributedStrategy.from_dict(document) == expected


UNKNOWN: list[tuple[dict[str, Any], list[str]]] = [
    ({"dcg": {}}, ["strategy.dcg={}", "'dgc'"]),
    ({"dgc": {"sparsty": 0.9}}, ["strategy.dgc.sparsty=0.9", "'sparsity'"]),
    (
        {"localsgd": {"k_steps": 2, "compression": {"sparsity": 0.5, "value_bits": 2}}},
        ["localsgd.compression", "left thinwire in 0.4: write sparse:"],
    ),
    (
        {"localsgd": {"k_steps": 2, "compression": {"quantised": {}}}},
        ["compression.quantised={}", "'quantized'"],
    ),
    (
        {"localsgd": {"k_steps": 2, "compression": {"quantized": {}, "sparse": {}}}},
        [
            "strategy.localsgd.compression must have one key of dgc and low_rank and sparse and "
            "quantized"
        ],
    ),
    (
        {"localsgd": {"k_steps": 2, "compression": {"sparse": {"value_bits": 4}}}},
        ["compression.sparse lacks sparsity"],
    ),
    ({"amp": {"loss_scale": {"dynamc": {}}}}, ["strategy.amp.loss_scale.dynamc={}", "'dynamic'"]),
    (
        {"zzz": 1, "lars": {"lars_coef": 1}, 3: 4},
        ["strategy.zzz=1", "known are amp", "strategy.3=4"],
    ),
    ({"localsgd": {"k_steps": 4, "mixing": 0.5}}, ["localsgd.mixing left thinwire in 0.4"]),
    ({"localsgd": {"k_steps": 4, "fragment_order": "strided"}}, ["fragment_order left"]),
    ({"localsgd": {"k_steps": 4, "average_state": 3}}, ["average_state=3", "write true or false"]),
    (
        {
            "localsgd": {
                "k_steps": 4,
                "compression": {"sparse": {"sparsity": 0.9, "clip_sources": 2}},
            }
        },
        ["clip_sources left thinwire in 0.4"],
    ),
    ({"a\x1b]0;b\x07": 1}, [r"'strategy.a\x1b]0;b\x07'=1 is unknown"]),
    ({"gradient_merge": {}}, ["strategy.gradient_merge lacks k_steps"]),
    (
        {"amp": {"loss_scale": {"fixed": {}, "dynamic": {}}}},
        ["strategy.amp.loss_scale must have one key"],
    ),
]


@pytest.mark.parametrize(("document", "parts"), UNKNOWN, ids=str)
def test_document_unknown_and_missing_are_named(document: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(tw.StrategyError) as error:
        tw.DistributedStrategy.from_dict(document)
    for part in parts:
        assert part in str(error.value)


WRONG: list[tuple[Any, type[Exception], list[str]]] = [
    (3, TypeError, ["strategy must be a mapping", "3", "int"]),
    ([], TypeError, ["strategy must be a mapping", "[]"]),
    ({"dgc": True}, TypeError, ["strategy.dgc must be a mapping", "True", "from_fleet"]),
    ({"dgc": {"sparsity": 0.9}}, TypeError, ["strategy.dgc.sparsity", "0.9", "list"]),
    ({"dgc": {"sparsity": ["0.9"]}}, TypeError, ["strategy.dgc.sparsity[0]", "'0.9'", "number"]),
    ({"dgc": {"min_numel": 1.5}}, TypeError, ["strategy.dgc.min_numel", "1.5", "integer"]),
    (
        {"gradient_merge": {"k_steps": 2, "avg": 1}},
        TypeError,
        ["strategy.gradient_merge.avg", "True or False"],
    ),
    ({"amp": {"loss_scale": 128}}, TypeError, ["strategy.amp.loss_scale must be a mapping", "128"]),
    (
        {"amp": {"loss_scale": {"fixed": {"loss_scale": "8"}}}},
        TypeError,
        ["loss_scale.fixed.loss_scale", "'8'"],
    ),
    (
        {"localsgd": {"k_steps": 2, "compression": {"quantized": {"value_bits": 32}}}},
        ValueError,
        ["quantized.value_bits"],
    ),
    (
        {"localsgd": {"k_steps": 2, "compression": {"quantized": 4}}},
        TypeError,
        ["compression.quantized", "4"],
    ),
    ({"amp": {"dtype": "float8"}}, ValueError, ["strategy.amp.dtype", "'float8'", "bfloat16"]),
    ({"dgc": {"sparsity": [0.5, 1]}}, ValueError, ["strategy.dgc.sparsity[1]", "< 1"]),
    ({"recompute": {"checkpoints": []}}, ValueError, ["strategy.recompute.checkpoints"]),
    ({"lars": {}, "lamb": {}}, tw.StrategyError, ["lars and lamb"]),
]


@pytest.mark.parametrize(("document", "kind", "parts"), WRONG, ids=str)
def test_document_wrong_values_are_named_by_path(
    document: Any, kind: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(kind) as error:
        tw.DistributedStrategy.from_dict(document)
    assert type(error.value) is kind
    for part in parts:
        assert part in str(error.value)


TRAPS: dict[str, tuple[type[Exception], int, str]] = {
    "": (tw.StrategyError, 1, "empty"),
    "# nothing\n": (tw.StrategyError, 1, "empty"),
    "- dgc\n": (TypeError, 1, "strategy must be a mapping"),
    "dgc": (TypeError, 1, "strategy must be a mapping"),
    "lars: {}\ndgc:\n": (tw.StrategyError, 2, "strategy.dgc has no value"),
    "gradient_merge:\n  k_steps: 2\n  avg: on\n": (
        TypeError,
        3,
        "strategy.gradient_merge.avg must be True or False",
    ),
    "dgc: off\n": (TypeError, 1, "strategy.dgc must be a mapping, got 'off'"),
    "dgc:\n  min_numel: 1_000\n": (TypeError, 2, "'1_000'"),
    "dgc:\n  min_numel: 010\n": (TypeError, 2, "'010'"),
    "dgc:\n  min_numel: 1:30\n": (TypeError, 2, "'1:30'"),
    "lars:\n  epsilon: .nan\n": (ValueError, 2, "strategy.lars.epsilon"),
    "dgc: {}\nlars: {}\ndgc: {}\n": (tw.StrategyError, 3, "given twice; the first time on line 1"),
    "dgc: &x {}\nlars: *x\n": (tw.StrategyError, 2, "aliases"),
    "dgc: {}\n<<: {}\n": (tw.StrategyError, 2, "strategy.<<={}"),
    "1: {}\n": (tw.StrategyError, 1, "a key of strategy must be a word, got '1'"),
    "true: {}\n": (tw.StrategyError, 1, "a key of strategy must be a word"),
    "? [a]\n: {}\n": (tw.StrategyError, 1, "a key of strategy must be a word"),
    "dgc: !!python/object:os.x {}\n": (tw.StrategyError, 1, "python/object"),
    "dgc: {min_numel: !!int x}\n": (tw.StrategyError, 1, "2002:int"),
    "dgc: !!map x\n": (tw.StrategyError, 1, "tag:yaml.org,2002:map"),
    "dgc: !%1B[31m x\n": (tw.StrategyError, 1, r"the tag '!\x1b[31m'"),
    '"d\\e]0;x\\agc": {}\n': (tw.StrategyError, 1, r"must be a word, got 'd\x1b]0;x\x07gc'"),
    f"dgc: {{min_numel: {'1' * 5000}}}\n": (tw.StrategyError, 1, "strategy.dgc.min_numel"),
    "dgc: {\n": (tw.StrategyError, 2, "not YAML"),
    "dgc: {}\n\tlars: {}\n": (tw.StrategyError, 2, "not YAML"),
    "dgc: {}\n\0": (tw.StrategyError, 2, "not YAML"),
    "dgc: {}\n---\nlars: {}\n": (tw.StrategyError, 2, "not YAML"),
    "[" * 1500: (tw.StrategyError, 1, "nested too deeply"),
    "lars: {}\nlamb:\n  lamb_weight_decy: 1\n": (
        tw.StrategyError,
        3,
        "did you mean 'lamb_weight_decay'",
    ),
}


@pytest.mark.parametrize("text", TRAPS, ids=lambda text: repr(text[:40]))
def test_file_not_a_strategy_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    kind, line, part = TRAPS[text]
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(kind) as error:
        tw.DistributedStrategy.load(path)
    assert type(error.value) is kind
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert part in str(error.value)


@pytest.mark.timeout(60)
def test_file_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.yaml")
    with pytest.raises(OSError, match=r"a pipe or a device, not a regular file.*plan\.yaml"):
        tw.DistributedStrategy.load(tmp_path / "plan.yaml")


def test_file_quoted_words_may_have_any_space(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text('# a\xa0b\nlars: {exclude_from_weight_decay: ["a\xa0b"]}\n', encoding="utf-8")
    assert tw.DistributedStrategy.load(path).lars == tw.LARS(exclude_from_weight_decay=("a\xa0b",))


def test_file_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"dgc: {}\n# caf\xe9\n")
    with pytest.raises(tw.StrategyError, match=rf"{path}:2: byte 0xe9 is not UTF-8"):
        tw.DistributedStrategy.load(path)


def test_file_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.yaml"):
        tw.DistributedStrategy.load(tmp_path / "gone.yaml")
    with pytest.raises(IsADirectoryError):
        tw.DistributedStrategy.load(tmp_path)


def test_file_numbers_are_decimal(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(
        b"\xef\xbb\xbflars: {lars_coeff: 1e-3, epsilon: 1E-8, lars_weight_decay: +.5}\r\ndgc: "
        b"{min_numel: +7}\n"
    )
    expected = tw.DistributedStrategy(lars=tw.LARS(1e-3, 0.5, 1e-8), dgc=tw.DGC(min_numel=7))
    assert tw.DistributedStrategy.load(str(path)) == expected


def documented(config: type) -> dict[str, str]:
    """The first words of each attribute's entry, and where they begin, from the source."""
    tree = ast.parse(inspect.getsource(config))
    docstring = ast.get_docstring(tree.body[0]) or ""  # type: ignore[arg-type]
    inside = docstring.split("Attributes:")[1].split("Raises:")[0].splitlines()
    entries = [line.strip().split(": ", 1) for line in inside if re.match(r"    \w+: ", line)]
    return {
        name: text.replace("`", "").replace("*", "").split(".")[0][:40] for name, text in entries
    }


def test_file_saved_has_a_comment_on_every_key(tmp_path: Path) -> None:
    full = {
        **CONFIGS,
        "amp": tw.AMP("float16", tw.DynamicLossScale()),
        "localsgd": tw.LocalSGD(4, compression=tw.Sparse(0.9)),
    }
    nested = {"loss_scale": tw.DynamicLossScale, "compression": tw.Sparse}
    for name, config in full.items():
        text = text_of(tw.DistributedStrategy(**{name: config}))
        lines = text.splitlines()
        top = lines.index(f"{name}:" if fields(config) else name)
        assert documented(tw.DistributedStrategy)[name] in " ".join(
            line.lstrip("# ") for line in lines[:top]
        )
        for kind in [
            type(config),
            *(nested[key] for key in nested if getattr(config, key, None) is not None),
        ]:
            lacking = dict(documented(kind))
            for key in [field.name for field in fields(kind)]:
                at = next(i for i, line in enumerate(lines) if re.match(rf" +(# )?{key}:", line))
                comment = lines[at - 1]
                assert comment.lstrip().startswith("# "), (name, key)
                if not lacking[key].startswith(("See ", "As in ")):
                    said = re.sub(r"\n *# ", " ", "\n".join(lines[:at]))
                    assert lacking[key] in said, (name, key)
        assert "See LocalSGD" not in text
        off = [other for other in full if other != name]
        assert all(
            f"# {other}: {documented(tw.DistributedStrategy)[other]}" in text for other in off
        )
        assert max(map(len, lines)) <= 100


def test_save_makes_parents_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b" / "plan.yaml"
    first, second = tw.DistributedStrategy(dgc=tw.DGC()), tw.DistributedStrategy(lars=tw.LARS())
    first.save(path)

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        second.save(path)
    assert tw.DistributedStrategy.load(path) == first
    assert [file.name for file in path.parent.iterdir()] == ["plan.yaml"]
    monkeypatch.undo()
    second.save(str(path))
    assert tw.DistributedStrategy.load(path) == second


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_files_are_as_saved(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == text_of(tw.DistributedStrategy.load(path))
