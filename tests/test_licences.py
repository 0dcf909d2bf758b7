"""The table of docs/licences.md is what the packages of constraints.txt say of themselves."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(re.findall(r"^(.+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
ROW = re.compile(r"^\| ([\w-]+) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def needed() -> Iterator[tuple[str, str]]:
    """Each dependency with what needs it."""
    for requirement in PROJECT["dependencies"]:
        yield re.split(r"[><=; ]", requirement)[0], "the library"
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for requirement in requirements:
            on = ", on Linux" if "sys_platform == 'linux'" in requirement else ""
            yield re.split(r"[><=; ]", requirement)[0], f"`{extra}`{on}"


def rows() -> dict[str, tuple[str, str]]:
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    found = {name: (by, licence) for name, by, licence in ROW.findall(page)}
    return {name: row for name, row in found.items() if name != "package"}


def licence(package: str) -> str:
    """What a package says: an expression, else a classifier, else words."""
    said = metadata.metadata(package)
    prefix = "License :: OSI Approved :: "
    classifiers = [c.removeprefix(prefix) for c in said.get_all("Classifier") or [] if prefix in c]
    return said.get("License-Expression") or " AND ".join(classifiers) or str(said.get("License"))


def test_every_dependency_has_a_row() -> None:
    by_package = defaultdict(list)
    for package, by in needed():
        by_package[package].append(by)
    assert {name: by for name, (by, _) in rows().items()} == {
        package: ", ".join(several) for package, several in by_package.items()
    }


@pytest.mark.parametrize("package", [name for name, _ in needed()])
def test_licence_equals_the_packages(package: str) -> None:
    try:
        version = metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if version != PINNED[package]:
        pytest.skip(f"{package} is {version}: a test with another version of torch")
    assert rows()[package][1] == licence(package)
