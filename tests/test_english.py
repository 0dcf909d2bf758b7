"""Names and prose are the field's terms: `make check` runs `python -m tests.test_english`."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = {
    *("adopt", "among", "became", "board", "courier", "dealing", "each", "elsewhere", "giver"),
    *("goer", "heard", "heir", "hold", "keeper", "legacy", "likeness", "mine", "misuse"),
    *("newcomer", "newcomers", "origin", "passing", "place", "places", "proofs", "roll", "said"),
    *("seal", "serve", "spoiled", "taker", "those", "told", "turn", "turns", "what", "who"),
    *("whose",),
}
"""Words that no name of the package and no name of a test contains: each has a better term."""
PROSE = re.compile(
    r"\b(couriers?|keepers?|givers?|heirs?|newcomers?|goers?|misuse|likeness|signs of life"
    r"|leave it away|said twice|mend(s|ed|ing)?|spoil(s|ed|t|ing)?)\b",
    re.IGNORECASE,
)
"""Words that neither the package nor the documents use."""
OPENINGS = ("What", "Whether", "Which", "Who")
"""First words that no more than one docstring in a hundred has."""
PUBLIC = ("", ".amp", ".checkpoint", ".integrations", ".optim", ".schedules")
"""Modules whose classes and functions are for users."""
EXAMPLES = 0.6
"""Share of them that have an example, at least."""


def sources() -> dict[Path, ast.Module]:
    """Syntax trees of the package by file."""
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "src").rglob("*.py"))
    }


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def dialect() -> list[str]:
    """One line for every name and every line of text with a word that has a better one."""
    found = []
    for path, tree in sources().items():
        for line, name in [(1, path.stem), *_names(tree)]:
            if NAMES & {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)}:
                found.append(f"{path.relative_to(ROOT)}:{line}: the name {name}")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for line, name in _names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith("test_") and NAMES & set(name.split("_")):
                found.append(f"{path.relative_to(ROOT)}:{line}: the name {name}")
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("docs", "examples", "src"):
        texts += [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.py")]
    for path in sorted(texts):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := PROSE.search(text):
                found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}")
    return found


def openings() -> tuple[list[str], int]:
    """Docstrings that begin with a question word, and the number of all."""
    found, count = [], 0
    for path, tree in sources().items():
        for node in ast.walk(tree):
            for text, line in _docstrings(node):
                count += 1
                if text.split()[0] in OPENINGS:
                    found.append(f"{path.relative_to(ROOT)}:{line}: {text.split('.')[0]}")
    return found, count


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """That of a module, class or function, and those below the attributes of a body."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or isinstance(node, ast.If | ast.For | ast.With | ast.Try):
        return
    for index, statement in enumerate(body):
        follows = index and isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
            and statement.value.value.strip()
            and (not index or follows)
        ):
            yield statement.value.value, statement.lineno


def without_example() -> tuple[list[str], int]:
    """Public classes and functions that have no example, and the number of all."""
    found, names = [], set()
    for suffix in PUBLIC:
        module = importlib.import_module(f"thinwire{suffix}")
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or value in names:
                continue
            names.add(value)
            text = inspect.getdoc(value) or ""
            if "Example" not in text and ">>>" not in text:
                found.append(f"{module.__name__}.{name}")
    return found, len(names)


def faults() -> list[str]:
    """One line for every rule that is broken."""
    lines = dialect()
    first_words, docstrings = openings()
    if len(first_words) > docstrings / 100:
        lines += [*first_words, f"{len(first_words)} of {docstrings} docstrings, limit 1 %"]
    plain, public = without_example()
    if len(plain) > (1 - EXAMPLES) * public:
        lines.append(f"no example in {len(plain)} of {public}: {', '.join(plain)}")
    return lines


def test_names_and_prose_are_plain_english() -> None:
    assert faults() == []


if __name__ == "__main__":
    print("\n".join(faults()) or "names and prose are plain English")
    sys.exit(bool(faults()))
