"""What is loaded is what was saved, in kinds and in every bit."""

import enum
import json
import math
import random
import tempfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.api import Group, load, save
from tests.checkpoint.states import same
from thinwire.errors import CheckpointError


def returned(state: Any, root: Path, facts: dict[str, Any] | None = None) -> Any:
    group = Group()
    save(root, state, step=1, group=group, facts=facts or {})
    loaded = load(root, group=group)
    assert loaded.facts == (facts or {})
    return loaded.state


def dtypes() -> list[torch.dtype]:
    """Every dtype with a whole number of bytes and a CPU tensor to hold it."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    parted = ("torch.q", "torch.int", "torch.uint", "torch.bits")
    whole = {"torch.int8", "torch.int16", "torch.int32", "torch.int64"}
    whole |= {"torch.uint8", "torch.uint16", "torch.uint32", "torch.uint64"}
    return sorted((d for d in found if not str(d).startswith(parted) or str(d) in whole), key=str)


def of_random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(
        0, top, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


def test_dtypes_of_the_day_are_all_here() -> None:
    assert {
        torch.float32,
        torch.bfloat16,
        torch.bool,
        torch.uint64,
        torch.complex128,
        torch.complex32,
    } <= set(dtypes())
    assert len(dtypes()) >= 20


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (2, 3)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {str(dtype): of_random_bits(dtype, shape) for dtype in dtypes()}
    assert same(returned(state, tmp_path), state)


def test_views_shared_storage_and_gradients(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(torch.ones(2))
    state = {
        "transposed": base.t(),
        "every second": base[::2, 1::2],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "whole": base,
        "again": base,
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": parameter,
    }
    came = returned(state, tmp_path)
    assert same(came, {**state, "parameter": parameter.detach()})
    assert not came["parameter"].requires_grad
    came["whole"].zero_()
    assert torch.equal(came["again"], base)


class Colour(enum.IntEnum):
    red = 1


class Word(str, enum.Enum):  # noqa: UP042 (whose str is no plain value)
    yes = "y"


Pair = namedtuple("Pair", "x y")


def test_subclasses_come_back_as_the_plain_type(tmp_path: Path) -> None:
    state = {"a": OrderedDict(x=1), "b": Colour.red, "c": Pair(1, 2.0), "d": torch.Size([2, 3])}
    assert same(returned(state, tmp_path), {"a": {"x": 1}, "b": 1, "c": (1, 2.0), "d": (2, 3)})
    assert same(returned({Word.yes: [Word.yes]}, tmp_path), {"y": ["y"]})


@pytest.mark.parametrize(
    "state",
    [
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a_b": torch.ones(2)},
        {0: torch.ones(1), "0": torch.zeros(1)},
        {
            "__metadata__": torch.ones(1),
            "": torch.zeros(1),
            "\ud800": torch.ones(2),
            "ü\n": torch.ones(3),
        },
        torch.ones(3),
        [],
        None,
        {"tensor": "x", "dict": {"tuple": [1]}, "float": "inf"},
        [random.Random(1).getstate(), 2**127, -0.0, 5e-324, math.inf, -math.inf],
    ],
    ids=range(8),
)
def test_odd_names_and_values(tmp_path: Path, state: Any) -> None:
    assert same(returned(state, tmp_path), state)


tensors = st.builds(
    of_random_bits, st.sampled_from(dtypes()), st.lists(st.integers(0, 3), max_size=3).map(tuple)
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(state=trees)
def test_any_tree(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert same(returned(state, Path(folder)), state)


def test_facts_come_back_to_every_rank_as_they_were(tmp_path: Path) -> None:
    facts = {
        "strategy": {"dgc": {"sparsity": (0.9, 0.99)}},
        "layout": [("w", (2, 3))],
        "rate": math.inf,
        "none": None,
    }
    returned(1, tmp_path, facts)


def test_any_reader_of_safetensors_can_read_the_tensors(tmp_path: Path) -> None:
    state = {
        "model": {
            "layer.weight": torch.rand(3, 2),
            "steps": torch.tensor(7),
            "flag": torch.tensor([True]),
        }
    }
    path = save(tmp_path, state, step=12, group=Group(), facts={})
    assert path == tmp_path / "step_0000000012"
    came = load_file(path / "rank_00000.safetensors")
    assert same(
        dict(sorted(came.items())), {f"model/{k}": v for k, v in sorted(state["model"].items())}
    )
    assert json.loads((path / "manifest.json").read_text())["step"] == 12


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": [1, {2}]}, "state/a/1 is of type set; a checkpoint holds None"),
        ({"a": torch.float32}, "state/a is of type dtype"),
        ({True: 1}, "state has the key True of type bool"),
        ({"x": {None: 1}}, "state/x has the key None of type NoneType"),
        ({"a": torch.eye(2).to_sparse()}, "state/a is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, device="meta")}, "state/a is a meta tensor"),
    ],
)
def test_state_a_checkpoint_cannot_store_is_named(tmp_path: Path, state: Any, text: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"preparing a checkpoint failed on rank 0: TypeError: "
    ) as caught:
        save(tmp_path, state, step=1, group=Group(), facts={})
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []
