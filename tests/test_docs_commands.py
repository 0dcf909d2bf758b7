"""Every command on a page exists: programs and options, targets of make, modules and files."""

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from torch.distributed.run import get_args_parser

from tests.api import main

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "research").rglob("README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`((?:thinwire|make|python -m) [^`]*?)`")
HERE_DOCUMENT = re.compile(r"<<'EOF'.*?^EOF$", re.DOTALL | re.MULTILINE)
OURS = {"thinwire", "torchrun", "make", "python", "pip"}


def commands(path: Path) -> Iterator[list[str]]:
    """Words of each command of ours on a page, without the variables before it."""
    text = path.read_text(encoding="utf-8")
    lines = []
    for block in (fence[2] for fence in FENCE.finditer(text) if fence[1] in {"bash", ""}):
        lines += HERE_DOCUMENT.sub("", block).replace("\\\n", " ").splitlines()
    for span in SPAN.findall(FENCE.sub("", text)):
        words = " ".join(span.split())
        # not those that are shortened, that name an option, or that are what the doctor says
        if not re.search(r"\.\.\.|…|--[\w-]+$| is ", words):
            lines.append(words)
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words and words[0] in OURS:
            yield words


@pytest.fixture(scope="module")
def app() -> App:
    with pytest.raises(SystemExit):
        main(["--help"])  # the commands are added at the first call
    from tests.api import app as ours

    return ours


def check(app: App, words: list[str]) -> None:
    """Raises what the program itself would."""
    program, *rest = words
    if program == "thinwire" and len(rest) == 1:  # the name of a command
        assert rest[0] == "--version" or rest[0] in app, f"no command {rest[0]}"
    elif program == "thinwire":
        app.parse_args(rest, exit_on_error=False, print_error=False)
    elif program == "torchrun":
        parsed = torchrun().parse_args(rest)
        if parsed.training_script == "thinwire":
            check(app, ["thinwire", *parsed.training_script_args])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        unknown = {word for word in rest if "=" not in word and word[0] != "-"} - set(targets)
        assert not unknown, f"no target of make: {unknown}"
    elif program == "python" and rest[0] == "-m":
        module = rest[1].replace(".", "/")
        if rest[1].partition(".")[0] in {"benchmarks", "research", "tests"}:
            places = (f"{module}.py", f"{module}/__main__.py")
            assert any((ROOT / place).exists() for place in places), f"no module {rest[1]}"
    elif program == "python":
        assert (ROOT / rest[0]).exists(), f"no file {rest[0]}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        for asked in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
            assert set(asked.split(",")) <= set(extras["optional-dependencies"]), asked


def torchrun() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.exit_on_error = False
    return parser


@pytest.mark.parametrize(
    "path", [page for page in PAGES if any(commands(page))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_commands_of_a_page_are_taken(app: App, path: Path) -> None:
    for words in commands(path):
        check(app, words)


def test_no_page_installs_thinwire_from_an_index() -> None:
    pages = "".join(page.read_text("utf-8") for page in PAGES if page.name != "README.md")
    assert not re.findall(r"pip install [^`\n]*[ ']thinwire\b[^`\n]*", pages)


@pytest.mark.parametrize(
    "line",
    [
        "thinwire compare --wrokers 2",
        "thinwire confess",
        "torchrun --nproc-per-node 2 -m thinwire probe --otu probe.json",
        "torchrun --nprocs 2 train.py",
        "make everything",
        "python -m benchmarks.gone",
        "python examples/gone.py",
        "pip install '.[quick]'",
    ],
)
def test_a_command_that_there_is_not_is_found(
    app: App, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((Exception, SystemExit)) as caught:
        check(app, shlex.split(line))
    assert re.search(
        "wrokers|confess|otu|nprocs|everything|gone|quick", f"{caught.value}{capsys.readouterr()}"
    )
