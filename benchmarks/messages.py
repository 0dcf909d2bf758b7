"""List every message of the package, to read and edit them in one go.

    python -m benchmarks.messages         # errors, warnings and logs
    python -m benchmarks.messages --all   # and every other text of four words, help and pages too

One a line: file, line, kind and text, sorted by file. A value in a text is shown as `{expression}`.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "src" / "thinwire"
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
FINDINGS = {"note", "wrong"}
"""Functions that make the findings of `thinwire doctor`."""
FEWEST_WORDS = 4


class Message(NamedTuple):
    """One text of the source."""

    file: str
    line: int
    kind: str
    text: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """Return all texts by file and line; the kind is "text" if no error, warning or log has it."""
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(package.parent.parent).as_posix()
        found += [Message(name, *row) for row in sorted(_texts(tree, "text"))]
    return found


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each string below a node, docstrings aside."""
    if isinstance(node, ast.Raise):
        kind = "raise"
    elif isinstance(node, ast.Call) and kind != "raise":
        kind = _kind_of_call(node) or kind
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = _rendered(node)
    if text is None:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child, kind)
    elif len(text.split()) >= (FEWEST_WORDS if kind == "text" else 2):
        assert isinstance(node, ast.expr), "only expressions are rendered"
        yield node.lineno, kind, " ".join(text.split())


def _kind_of_call(call: ast.Call) -> str | None:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "warn":
        return "warn"
    if name in LOGS and isinstance(function, ast.Attribute):
        return "log"
    if name in FINDINGS and isinstance(function, ast.Name):
        return "doctor"
    return "raise" if name.endswith(("Error", "Mismatch")) else None


def _rendered(node: ast.AST) -> str | None:
    """Return the text of a string expression; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_rendered(part) or "" for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = _rendered(left), _rendered(right)
            if both == (None, None):
                return None
            values = zip(both, (left, right), strict=True)
            return "".join("{" + ast.unparse(v) + "}" if t is None else t for t, v in values)
    return None


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every text of four words or more")
    everything = parser.parse_args().all
    for message in messages():
        if everything or message.kind != "text":
            print(f"{message.file}:{message.line}: {message.kind}: {message.text}")


if __name__ == "__main__":
    main()
