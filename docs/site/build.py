"""Build the site from the Markdown of the repository: `make site`, or
`python docs/site/build.py FOLDER`.

Pages keep their places in the repository, where their links lead to files. Here they are copied
beside each other, each link is pointed at the copy, and Sphinx makes pages of them; a link that
leads nowhere, or a name that autodoc does not know, is an error.
"""

import argparse
import ast
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import answers
import figure
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "site"
EXAMPLES = ROOT / "examples"
ELSEWHERE = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "reporting.md",
    ROOT / "benchmarks" / "README.md": "benchmarks.md",
    ROOT / "benchmarks" / "performance.md": "performance.md",
    ROOT / "research" / "README.md": "research.md",
    **{page: f"research/{page.parent.name}.md" for page in ROOT.glob("research/*/README.md")},
    EXAMPLES: "examples/index.md",
}
"""Pages of the site whose source lies outside docs/."""

MADE = {"figure": figure.figure, "answers": answers.table}
"""Parts of pages that are computed; `<!-- made: NAME -->` marks their place."""

TOKEN = re.compile(
    r"^```.*?^```$|(?P<text>\[(?:`[^`\n]*`|[^\[\]`])*\]\()(?P<target>[^()\s]+)\)|`[^`\n]*`",
    re.DOTALL | re.MULTILINE,
)
"""A block of code, a link, or code in a line; what looks like a link in code is none."""
SCHEME = re.compile(r"[a-z]+:")


def place(source: Path) -> str:
    """Where a file of the repository lies in the site's source."""
    if source in ELSEWHERE:
        return ELSEWHERE[source]
    if source.is_relative_to(SITE):
        return source.relative_to(SITE).as_posix()
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    if source.is_relative_to(EXAMPLES) and source.suffix != ".csv":
        inside = source.relative_to(EXAMPLES).as_posix()
        return f"examples/{inside}.md" if source.is_file() else "examples/index.md"
    return f"files/{source.relative_to(ROOT).as_posix()}"


def with_links(text: str, source: Path, found: set[Path]) -> str:
    """A page whose links lead to the copies of what they led to; what they lead to is added to
    `found`.
    """
    here = Path(place(source)).parent

    def moved(link: re.Match[str]) -> str:
        target, _, anchor = (link["target"] or "").partition("#")
        if not target or SCHEME.match(target):
            return link[0]
        file = Path(os.path.normpath(source.parent / target))
        if not file.exists():
            raise SystemExit(f"{source.relative_to(ROOT)}: there is no {target}")
        found.add(file)
        there = os.path.relpath(place(file), here)
        return f"{link['text']}{there}{'#' + anchor if anchor else ''})"

    return TOKEN.sub(moved, text)


def with_parts(text: str, found: set[Path]) -> str:
    """A page with its computed parts, and with sections of README, in place of their marks."""

    def section(mark: re.Match[str]) -> str:
        source = ROOT / "README.md"
        text = source.read_text(encoding="utf-8").partition(f"\n## {mark[1]}\n")[2]
        return with_links(text.partition("\n## ")[0], source, found)

    text = re.sub(r"<!-- README: (.+) -->", section, text)
    return re.sub(r"<!-- made: (\w+) -->", lambda mark: MADE[mark[1]](), text)


def write(folder: Path, source: Path, text: str, found: set[Path]) -> None:
    """Put a page into the site's source."""
    page = folder / place(source)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(with_parts(with_links(text, source, found), found), encoding="utf-8")


def add_summaries(folder: Path) -> None:
    """Put a table of names, with the first sentence of each docstring, on every page of the API."""
    for page in (folder / "api").glob("*.rst"):
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)$", text, re.MULTILINE)
        for module in re.findall(r"^\.\. automodule:: ([\w.]+)$", text, re.MULTILINE):
            names += [f"{module}.{name}" for name in import_module(module).__all__]
        if len(names) > 1:
            rows = "\n".join(f"   ~{name}" for name in names)
            table = f".. autosummary::\n   :nosignatures:\n\n{rows}\n"
            title, line, rest = text.split("\n", 2)
            page.write_text(f"{title}\n{line}\n\n{table}\n{rest}", encoding="utf-8")


def first_line(example: Path) -> str:
    """What an example says of itself, without how it is started."""
    text = example.read_text(encoding="utf-8")
    if example.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = text.lstrip("# ").partition("\n")[0]
    return re.sub(r": torchrun .*", ".", " ".join(said.partition("\n\n")[0].split()))


def write_examples(folder: Path) -> None:
    """A page for each example, and one that lists them."""
    examples = sorted(p for p in EXAMPLES.rglob("*") if p.suffix in {".py", ".yaml"})
    names = [example.relative_to(EXAMPLES).as_posix() for example in examples]
    for example, name in zip(examples, names, strict=True):
        language = "python" if example.suffix == ".py" else "yaml"
        text = f"# {name}\n\n```{language}\n{example.read_text(encoding='utf-8')}```\n"
        page = folder / place(example)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    rows = [
        f"| [{name}]({name}.md) | {first_line(example)} |"
        for example, name in zip(examples, names, strict=True)
    ]
    listed = "\n".join(f"{name}.md" for name in names)
    (folder / "examples" / "index.md").write_text(
        "# Examples\n\nEach is short, runs on CPUs under torchrun, and is run by the tests.\n\n"
        "| file | what it shows |\n|---|---|\n" + "\n".join(rows) + "\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n",
        encoding="utf-8",
    )


def add_pages_without_a_place(folder: Path) -> None:
    """Put pages of docs/ that no table of contents names at the end of the first page's."""
    index = folder / "index.md"
    text = index.read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:.*<)?([\w/]+)>?$", text, re.MULTILINE))
    beside = (page for page in ELSEWHERE if page.suffix == ".md")
    pages = {place(page).removesuffix(".md") for page in (*DOCS.rglob("*.md"), *beside)}
    others = "\n".join(sorted(pages - named - {"index"}))
    if others:
        text += f"\n```{{toctree}}\n:hidden:\n:caption: More\n\n{others}\n```\n"
        index.write_text(text, encoding="utf-8")


def stage(folder: Path) -> None:
    """Write the site's source."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SITE, folder, ignore=shutil.ignore_patterns("*.md", "[!c]*.py", "__pycache__"))
    found: set[Path] = set()
    pages = [*DOCS.rglob("*.md"), *(p for p in ELSEWHERE if p.suffix == ".md")]
    for page in pages:
        if page.name != "README.md" or page.parent != ROOT:
            write(folder, page, page.read_text(encoding="utf-8"), found)
    write_examples(folder)
    add_summaries(folder)
    add_pages_without_a_place(folder)
    for file in found:
        copy = folder / place(file)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)


def main() -> int:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pages go")
    out: Path = parser.parse_args().folder
    source = out.with_name(out.name + "-source")
    stage(source)
    shutil.rmtree(out, ignore_errors=True)
    return sphinx(["-b", "html", "-W", "--keep-going", "-q", str(source), str(out)])


if __name__ == "__main__":
    sys.exit(main())
