"""Each layout of a model, bit for bit at each version, and untouched where a read fails."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.stream.models import CASES, Case, Model, Walk
from thinwire.errors import StreamError

PUBLISHED = [case for case in CASES if not case.unpublished or case.either]
OURS = ".json", ".step", ".safetensors"
REFUSED = [case for case in CASES if case.unpublished]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    slow = {"many-tiny": [pytest.mark.slow]}
    params = [pytest.param(case, id=case.name, marks=slow.get(case.name, ())) for case in cases]
    return pytest.mark.parametrize("case", params)


@named(PUBLISHED)
def test_layout_at_every_version_is_right_or_refused_by_name(case: Case, tmp_path: Path) -> None:
    walk = Walk(case, str(tmp_path), every=3)
    if case.unpublished and walk.refused():
        return
    publisher, reader = walk.publish(), case.reader()
    in_place, plain_one, late = walk.follow(reader), walk.follow(), walk.follow()
    for n in range(1, 6):
        assert walk.write(publisher, n) == n + bool(case.unpublished)
        case.adapt(reader, n)
        walk.read_newest(in_place, reader)
        walk.read_newest(plain_one)
        if n == 2:
            walk.read_newest(late)
    walk.read_newest(late)
    fresh = case.reader()
    case.adapt(fresh, 5)
    walk.read_newest(walk.follow(fresh), fresh)
    walk.read_newest(walk.follow())


@named(REFUSED)
def test_layout_that_cannot_be_published_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    walk = Walk(case, str(tmp_path))
    if not walk.refused():
        walk.written[0] = 0, case.wanted(walk.model), case.expected(walk.model)
        walk.read_newest(walk.follow())


def damages(content: bytes, foreign: bytes) -> Iterator[bytes | None]:
    """Yield what a file may become; None is that it is gone."""
    chance = random.Random(len(content))
    at, end = chance.randrange(len(content)), chance.randrange(len(content))
    yield content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
    yield content[:end]
    yield None
    yield foreign


def pattern_of(name: str) -> str:
    """Return the pattern of a file's name in another run."""
    number, dot, kind = name.partition(".")
    return name if number == "latest" else f"{number[:9]}*{dot}{kind}"


@pytest.mark.parametrize("token", [None, "a token"], ids=["", "token"])
@named([case for case in PUBLISHED if not case.unfollowed and case.name != "many-tiny"])
def test_damage_of_any_file_is_an_error_that_leaves_the_reader_as_it_was(
    case: Case, token: str | None, tmp_path: Path
) -> None:
    how = {"token": token, "every": 100}
    walk, other = (Walk(case, str(tmp_path / name), **how) for name in ("one", "other"))
    if case.unpublished and Walk(case, str(tmp_path / "refused")).refused():
        return
    follow = partial(walk.follow, token=token, patience=0.01)
    newest, records = tmp_path / "one" / "latest.json", []
    publisher, stranger = walk.publish(), other.publish()
    for n in (1, 2, 0):  # a base and two differences
        walk.write(publisher, n)
        other.write(stranger, n + 50)
        records.append(newest.read_bytes())

    def followed() -> tuple[tw.Follower, Model]:
        """Follow to the second version."""
        reader = case.reader()
        follower = follow(reader)
        newest.write_bytes(records[1])
        walk.read_until(walk.step - 1, follower, reader)
        newest.write_bytes(records[2])
        return follower, reader

    follower, reader = followed()
    files = [path for path in (tmp_path / "one").iterdir() if path.name.endswith(OURS)]
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        [foreign] = (tmp_path / "other").glob(pattern_of(path.name))
        for damaged in damages(content, foreign.read_bytes()):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            fresh = case.reader()
            found = walk.read(follow(fresh), fresh)
            assert isinstance(found, StreamError) or found == walk.step
            found = walk.read(follower, reader)
            path.write_bytes(content)
            if path == newest:  # gone, or below the one that is held: there is no news
                assert isinstance(found, StreamError) or found == walk.step - 1
            elif not isinstance(found, StreamError):  # it needs no base, and one difference
                assert found == walk.step
                follower, reader = followed()
    walk.read_until(walk.step, follower, reader)


@pytest.mark.parametrize("reader_dtype", [None, torch.float32])
def test_reader_that_flushes_subnormals_is_right_or_learns_why(
    tmp_path: Path, reader_dtype: torch.dtype | None
) -> None:
    [case] = [case for case in CASES if case.name == "subnormal"]
    walk = Walk(replace(case, reader_dtype=reader_dtype), str(tmp_path))
    publisher, reader = walk.publish(), walk.case.reader()
    if reader_dtype:
        reader = {name: tensor.to(reader_dtype) for name, tensor in reader.items()}
    follower = walk.follow(reader)
    for _ in range(2):
        walk.write(publisher)
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU flushes no subnormal numbers")
        try:
            found = walk.read(follower, reader)
        finally:
            torch.set_flush_denormal(False)
        if isinstance(found, StreamError):
            assert re.search("subnormal|denormal|flush", str(found)), found


@pytest.mark.parametrize("held", [True, False], ids=["in place", "held"])
def test_default_device_and_inference_mode_change_nothing(tmp_path: Path, held: bool) -> None:
    [case] = [case for case in CASES if case.name == "contiguous"]
    walk, reader = Walk(case, str(tmp_path)), case.reader()
    publisher, follower = walk.publish(), walk.follow(None if held else reader)
    for inside in (True, False, True):
        step = walk.change()
        with torch.device("meta" if inside else "cpu"), torch.inference_mode(inside):
            publisher.update(step)
            publisher.wait()
            version = follower.latest()
        walk.require_right(version, None if held else reader)
