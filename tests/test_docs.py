"""The documentation holds: every sample runs as it stands, and every link inside the repository
leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
LANGUAGES = {"python", "bash", "yaml", "text", "", "{toctree}"}
"""Another spelling of python would hide a sample from these tests."""


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def samples(path: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with the lines that stand before it."""
    text = path.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence[1] == "python":
            yield text[: fence.start(2)].count("\n"), fence[2]


def prose(path: Path) -> str:
    """A page without code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """The names that a page's headings get when it is shown."""
    headings = re.findall(
        r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    found = []
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", [page for page in PAGES if any(samples(page))], ids=label)
def test_the_samples_of_a_page_run_in_order(path: Path) -> None:
    names: dict[str, object] = {"__name__": path.stem}
    with torch.random.fork_rng(devices=[]):
        for lines_before, code in samples(path):
            # the empty lines make a traceback point into the page
            exec(compile("\n" * lines_before + code, str(path), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("path", LINKED, ids=label)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_no_sample_hides_behind_another_spelling(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {fence[1] for fence in FENCE.finditer(text)} <= LANGUAGES
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))


def test_every_note_on_a_method_has_a_sample() -> None:
    """DGC's is the program of the README, which needs several ranks."""
    notes = [page for page in PAGES if page.parent.name == "notes" and page.stem != "dgc"]
    assert len(notes) >= 9
    assert [page.name for page in notes if not any(samples(page))] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `x`\n[a](gone.md) [b](#one-x) [c](#two) [d](https://e.org) `[f](g)`\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["gone.md", "#two"]
