"""Every sample of the documents runs as it stands, and every link inside leads somewhere."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from types import ModuleType

import pytest
import torch

import thinwire
from tests.launched import run_script
from tests.ranks import Pool

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "site" / "api"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "research" / "scale" / "README.md"]
LINKED = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "research").rglob("README.md"),
    *PAGES,
]
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"# (\w+\.py): torchrun --nproc-per-node 2 \1\n")
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
LANGUAGES = {"python", "bash", "yaml", "text", "diff", "ini", "", "{toctree}"}
"""Another spelling of python would hide a sample from these tests."""


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def samples(path: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page that follow each other, with the lines that stand before each."""
    text = path.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence[1] == "python" and not SCRIPT.match(fence[2]):
            yield text[: fence.start(2)].count("\n"), fence[2]


def scripts(path: Path) -> list[str]:
    """The Python blocks of a page that say how to start them."""
    fences = FENCE.finditer(path.read_text(encoding="utf-8"))
    return [fence[2] for fence in fences if SCRIPT.match(fence[2])]


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
        # of the folders, the site has a page for the examples alone
        here = target.is_file() or target.resolve().is_relative_to(ROOT / "examples")
        if not (here and target.exists()) or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", [page for page in PAGES if any(samples(page))], ids=label)
def test_the_samples_of_a_page_run_in_order(path: Path) -> None:
    names: dict[str, object] = {"__name__": path.stem}
    with torch.random.fork_rng(devices=[]):
        for lines_before, code in samples(path):
            # the empty lines make a traceback point into the page
            exec(compile("\n" * lines_before + code, str(path), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("path", [page for page in PAGES if scripts(page)], ids=label)
def test_the_scripts_of_a_page_run_on_two_ranks(ranks: Pool, path: Path, tmp_path: Path) -> None:
    for number, code in enumerate(scripts(path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "script.py").write_text(code, encoding="utf-8")
        run_script(ranks, folder / "script.py", folder)
        written = sorted(folder.rglob("*"))
        if len(written) > 1:  # it has saved something, with which a second start goes on
            run_script(ranks, folder / "script.py", folder)


@pytest.mark.parametrize("path", LINKED, ids=label)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_no_sample_hides_behind_another_spelling(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {fence[1] for fence in FENCE.finditer(text)} <= LANGUAGES
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))


def test_readme_has_the_two_commands_that_set_all_up() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for fence in FENCE.finditer(text) for line in fence[2].splitlines()]
    for target in ("demo", "test"):
        assert [line for line in commands if re.match(rf"make {target}\b", line)], target


def test_every_note_on_a_method_has_a_sample() -> None:
    """DGC's is a program of docs/own_loop.md, which needs several ranks."""
    notes = [page for page in PAGES if page.parent.name == "notes" and page.stem != "dgc"]
    assert len(notes) >= 9
    assert [page.name for page in notes if not any(samples(page))] == []


@pytest.mark.parametrize(
    "module", [thinwire, thinwire.amp, thinwire.errors, thinwire.optim, thinwire.schedules]
)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in API.iterdir())
    named = re.findall(r"^\.\. auto\w+:: (thinwire(?:\.[A-Za-z]\w*)*)$", pages, re.MULTILINE)
    shown = [locate(name) for name in named if not name.startswith("thinwire.integrations.")]
    assert None not in shown
    names = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    missing = [
        name
        for name, it in names.items()
        if it not in shown
        and not isinstance(it, ModuleType)
        and not (inspect.isclass(it) and sys.modules[it.__module__] in shown)
    ]
    assert missing == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `x`\n[a](gone.md) [b](#one-x) [c](#two) [d](https://e.org) `[f](g)` [h](..)\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["gone.md", "#two", ".."]


def test_the_glossary_explains_words_that_are_used_and_in_order() -> None:
    page = ROOT / "docs" / "glossary.md"
    words = re.findall(r"^\| ([a-z ]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)[1:]
    others = [path for path in LINKED if path != page]
    used = "\n".join(path.read_text(encoding="utf-8") for path in others).lower()
    assert 10 < len(words) <= 20
    assert words == sorted(words)
    assert [word for word in words if not re.search(rf"\b{word.replace(' ', '[ _]')}", used)] == []
