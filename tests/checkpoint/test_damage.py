"""Damaged, missing, foreign and hostile files: found, named, passed over, never executed."""

import ast
import contextlib
import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire.checkpoint
from tests.api import Group, load, save
from tests.checkpoint.states import rank_state, same
from thinwire.errors import CheckpointCorrupt, CheckpointError

FILES = ("manifest.json", "rank_00000.json", "rank_00000.safetensors")
GROUP = Group()


def saved(root: Path, *steps: int) -> Path:
    for step in steps:
        path = save(root, rank_state(0, step), step=step, group=GROUP, facts={"f": step})
    return path


def require_named(root: Path, path: Path, file: str) -> None:
    try:
        state = load(root, group=GROUP).state
    except CheckpointCorrupt as error:
        assert str(path / file) in str(error)
        return
    raise AssertionError(f"damage in {file} was not found: {state}")


@pytest.mark.fault("bits flipped, files cut or missing")
@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """More than 10 000 of them: every bit of every file, one after the other."""
    path = save(
        tmp_path, {"a": torch.arange(110.0), "b": [1.5, "text"] * 20}, step=1, group=GROUP, facts={}
    )
    flips = 0
    for file in FILES:
        target = path / file
        whole = bytearray(target.read_bytes())
        with target.open("r+b", buffering=0) as handle:
            for place in range(len(whole)):
                for bit in range(8):
                    handle.seek(place)
                    handle.write(bytes([whole[place] ^ 1 << bit]))
                    require_named(tmp_path, path, file)
                    flips += 1
                handle.seek(place)
                handle.write(whole[place : place + 1])
    assert flips >= 10_000
    assert load(tmp_path, group=GROUP).state["b"] == [1.5, "text"] * 20


@pytest.mark.fault("bits flipped, files cut or missing")
@pytest.mark.parametrize("file", FILES)
def test_every_truncation_and_anything_added_is_found(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, {"a": torch.arange(3.0), "b": 1}, step=1, group=GROUP, facts={})
    whole = (path / file).read_bytes()
    for content in [
        *(whole[:size] for size in range(len(whole))),
        whole + b"\0",
        whole + b"\n",
        b" " + whole,
    ]:
        (path / file).write_bytes(content)
        require_named(tmp_path, path, file)


def removed(target: Path) -> None:
    target.unlink()


def a_folder(target: Path) -> None:
    target.unlink()
    target.mkdir()


def a_link(target: Path) -> None:
    target.rename(target.with_name("elsewhere"))
    target.symlink_to(target.with_name("elsewhere"))


def a_pipe(target: Path) -> None:
    target.unlink()
    os.mkfifo(target)


def a_giant(target: Path) -> None:
    os.truncate(target, 1 << 33)


def another_ones(target: Path) -> None:
    shutil.copy(target.parent.parent / "step_0000000001" / target.name, target)


@pytest.mark.fault("bits flipped, files cut or missing")
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [removed, a_folder, a_link, a_pipe, a_giant, another_ones])
def test_file_is_named_in_warning(tmp_path: Path, file: str, harm: Callable[[Path], None]) -> None:
    path = saved(tmp_path, 1, 2)
    harm(path / file)
    with pytest.warns(UserWarning, match="cannot be loaded") as caught:
        loaded = load(tmp_path, group=GROUP)
    assert len(caught) == 1
    assert str(path / file) in str(caught[0].message)
    assert (loaded.step, loaded.facts, loaded.path.name) == (1, {"f": 1}, "step_0000000001")
    assert same(loaded.state, rank_state(0, 1))


def test_a_manifest_is_read_up_to_a_limit(tmp_path: Path) -> None:
    os.truncate(saved(tmp_path, 1) / "manifest.json", 1 << 28)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json: it has more than 134,217,728 b"):
        load(tmp_path, group=GROUP)


def test_an_older_damaged_one_is_nobodys_business(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step_0000000001" / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, group=GROUP).step == 2


def test_a_step_back_on_purpose_counts_from_there(tmp_path: Path) -> None:
    """The newest is what was saved last, although another one has a larger step."""
    saved(tmp_path, 1, 9)
    saved(tmp_path, 5)
    assert load(tmp_path, group=GROUP).step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_0000000005",
        "step_0000000009",
    ]


def test_stray_files_do_not_matter(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2)
    (path / "rank_00000.safetensors.swp").write_text("x")
    (path / "notes").mkdir()
    (tmp_path / "step_1").mkdir()
    (tmp_path / "README").write_text("x")
    (tmp_path / "step_0000000003.bak").mkdir()
    assert load(tmp_path, group=GROUP).step == 2
    saved(tmp_path, 3)
    assert load(tmp_path, group=GROUP).step == 3
    assert (tmp_path / "README").exists() and (tmp_path / "step_1").exists()


def sealed(content: dict[str, Any]) -> bytes:
    """A manifest as a stranger who knows the format would write it, checksum included."""
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()
    )
    checksum = hashlib.sha256(lines.encode()).hexdigest()
    return f'{{\n{lines},\n "sha256": "{checksum}"\n}}\n'.encode()


def rewritten(path: Path, **changes: Any) -> None:
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    (path / "manifest.json").write_bytes(sealed({**content, **changes}))


@pytest.mark.fault("another method, or a newer format")
def test_newer_format_is_an_error_and_no_older_state_loads(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2)
    rewritten(path, format=3)
    with pytest.raises(
        CheckpointError, match="has format 3, but this version of thinwire reads format 2"
    ) as caught:
        load(tmp_path, group=GROUP)
    assert not isinstance(caught.value, CheckpointCorrupt)


ENTRY = [1, "0" * 64]


@pytest.mark.fault("hostile files")
@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../secret": ENTRY, "rank_00000.json": ENTRY}},
        {"files": {"/etc/passwd": ENTRY, "rank_00000.json": ENTRY}},
        {"files": {"rank_00000.json": ENTRY}},
        {"files": {"rank_00000.json": ENTRY, "rank_00000.safetensors": [-1, "0" * 64]}},
        {"files": {"rank_00000.json": ENTRY, "rank_00000.safetensors": [1, "x"]}},
        {"files": {"rank_00000.json": ENTRY, "rank_00000.safetensors": 5}},
        {"files": []},
        {"parts": "0"},
        {"parts": [0.0]},
        {"parts": []},
        {"directories": [[0], [0]]},
        {"directories": [["0"]]},
        {"directories": None},
        {"step": "../.."},
        {"step": 2},
        {"serial": -1},
        {"serial": True},
        {"facts": {"dict": {"a": {"tensor": "x"}}}},
        {"facts": {"dict": {"a": {"python/object": "os.system"}}}},
        {"facts": [1]},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path, 1)
    rewritten(path, **changes)
    with pytest.raises(CheckpointCorrupt, match=r"step_0000000001/manifest\.json: "):
        load(tmp_path, group=GROUP)


def forged(path: Path, name: str, content: bytes) -> None:
    """Replace a file together with its checksum."""
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewritten(path, files={**files, name: [len(content), checksum_of(name, content)]})


def checksum_of(name: str, content: bytes) -> str:
    """That of a file, by the documented format: of tensors each is hashed by itself."""
    size = 8 + int.from_bytes(content[:8], "little")
    header, data = content[:size], content[size:]
    parts: list[bytes] = [content]
    if name.endswith(".safetensors"):
        parts = [header]
        with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
            ends = [entry["data_offsets"] for entry in json.loads(header[8:]).values()]
            parts += [hashlib.sha256(data[start:end]).digest() for start, end in ends]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Bomb:
    def __reduce__(self) -> Any:
        return (Path("/nonexistent/bomb").touch, ())


def plain(**changes: Any) -> bytes:
    return json.dumps(
        {"tree": {"tensor": "a"}, "tensors": {"a": [0, "a", "float32", [3]]}, **changes}
    ).encode()


@pytest.mark.fault("hostile files")
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Bomb()),
        b"[" * 100_000,
        b"",
        b"null",
        b"1" * 5000,
        plain(tree={"python": "os.system"}),
        plain(tree={"dict": [1]}),
        plain(tree={"items": [[1]]}),
        plain(tree={"items": [[[], 1]]}),
        plain(tree={"float": "1e5"}),
        plain(tree={"bytes": "?"}),
        plain(tree={"tensor": "b"}),
        plain(tree={"tensor": "a", "dict": {}}),
        plain(tree=[{"tuple": [{"tensor": {}}]}]),
        plain(tensors={"a": [1, "a", "float32", [3]]}),
        plain(tensors={"a": [-1, "a", "float32", [3]]}),
        plain(tensors={"a": ["../0", "a", "float32", [3]]}),
        plain(tensors={"a": [0, "a", "load", [3]]}),
        plain(tensors={"a": [0, "a", "__builtins__", [3]]}),
        plain(tensors={"a": [0, "a", "float32", [-3]]}),
        plain(tensors={"a": [0, "a", "float32", [4]]}),
        plain(tensors={"a": [0, "a", "float64", [3]]}),
        plain(tensors={"a": [0, "a", "complex128", [3]]}),
        plain(tensors={"a": [0, "b", "float32", [3]]}),
        plain(tensors=[]),
    ],
    ids=range(25),
)
def test_a_hostile_tree_is_refused(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, {"a": torch.ones(3)}, step=1, group=GROUP, facts={})
    forged(path, "rank_00000.json", plain())
    assert torch.equal(load(tmp_path, group=GROUP).state, torch.ones(3))
    forged(path, "rank_00000.json", content)
    with pytest.raises(CheckpointError, match=r"step_0000000001/rank_00000\.(json|safetensors)"):
        load(tmp_path, group=GROUP)


@pytest.mark.fault("hostile files")
@pytest.mark.parametrize(
    "content", [pickle.dumps(Bomb()), b"", b"\xff" * 64, b"\x02" + bytes(7) + b"{}"]
)
def test_a_hostile_tensor_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, {"a": torch.ones(3)}, step=1, group=GROUP, facts={})
    forged(path, "rank_00000.safetensors", content)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        load(tmp_path, group=GROUP)


@pytest.mark.fault("hostile files")
def test_loading_cannot_execute_a_file() -> None:
    folder = Path(thinwire.checkpoint.__file__).parent
    words = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    words |= {part for alias in names for part in alias.name.split(".")}
                case ast.ImportFrom(module=str(module), names=names):
                    words |= {*module.split("."), *(alias.name for alias in names)}
                case ast.Call(func=function):
                    words.add(ast.unparse(function))
    assert "json" in words and "safe_open" in words
    forbidden = {
        *("pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "importlib", "eval"),
        *("exec", "compile"),
    }
    assert (
        words & {*forbidden, "torch.load", "torch.save", "np.load", "__import__", "subprocess"}
        == set()
    )
