"""A token file is its owner's alone and holds enough; anything else is one line that says why."""

import os
import re
import stat
from pathlib import Path

import pytest

from tests.api import derived_key, new_token, read_token


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        read_token(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def file_with(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_token_can_be_read_and_is_never_written_over(tmp_path: Path) -> None:
    path, other = tmp_path / "token", tmp_path / "other"
    before = os.umask(0)
    try:
        new_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = read_token(path)
    assert len(token) == 64
    with pytest.raises(ValueError, match="exists already"):
        new_token(path)
    assert read_token(str(path)) == token
    new_token(other)
    assert read_token(other) != token
    with pytest.raises(ValueError, match="No such file"):
        new_token(tmp_path / "no" / "token")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = file_with(tmp_path, b"x" * 32, mode)
    assert f"mode {mode:03o}" in refusal(path)
    assert f"chmod 600 {path}" in refusal(path)
    path.chmod(0o400)
    assert read_token(path) == b"x" * 32


@pytest.mark.parametrize("content", [b"", b" \n\n", b"fifteen bytes..\n", b"x" * 70_000])
def test_a_file_with_too_little_or_too_much_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "openssl rand -hex 32" in refusal(file_with(tmp_path, content))


def test_white_space_around_it_does_not_count(tmp_path: Path) -> None:
    assert read_token(file_with(tmp_path, b"\n sixteen bytes ..\r\n")) == b"sixteen bytes .."


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")
    assert "--new-token" in refusal(tmp_path / "none")
    assert "not a regular file" in refusal(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "not a regular file" in refusal(pipe)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    assert "Permission denied" in refusal(file_with(tmp_path, b"x" * 32, 0o000))


def test_keys_differ_by_purpose_and_by_how_it_is_divided() -> None:
    purposes = [("ab",), ("a", "b"), ("b", "a"), ("ab", ""), ("",), ()]
    keys = {derived_key(b"x" * 32, *purpose) for purpose in purposes}
    assert len(keys) == len(purposes)
    assert {len(key) for key in keys} == {32}
    assert derived_key(b"y" * 32, "ab") not in keys
