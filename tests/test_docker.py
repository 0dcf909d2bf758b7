"""The Dockerfile installs what there is: files, extras, and a version of Python of ours."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_image_has_a_python_and_extras_of_the_project() -> None:
    (version,) = re.findall(r"^ARG BASE=python:([\d.]+)-slim$", TEXT, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", TEXT)
    known = set(PROJECT["optional-dependencies"])
    assert set(extras.split(",")) == known == {"fast", "stream", "cli"}
    (command,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', TEXT, re.MULTILINE)
    assert command in PROJECT["scripts"]


def test_copied_files_exist_and_are_sent_to_the_builder() -> None:
    copied = [
        name for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for name in line.split()
    ]
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {"src", "pyproject.toml"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in sent] == []
