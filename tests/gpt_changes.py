"""What changes where examples/gpt/plain.py is moved, as docs/migrating.md shows it: python -m
tests.gpt_changes writes it there.
"""

import difflib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "migrating.md"
MOVED = ("attach", "engine", "local")
"""The ways."""


def lines_of(name: str) -> list[str]:
    """The script without its docstring."""
    text = (ROOT / "examples" / "gpt" / f"{name}.py").read_text(encoding="utf-8")
    return text.split('"""', 2)[2].strip().splitlines()


def changes(name: str) -> list[str]:
    """The lines that go (-) and come (+), each with the line before it."""
    before, after = lines_of("plain"), lines_of(name)
    matcher = difflib.SequenceMatcher(
        None, [line.strip() for line in before], [line.strip() for line in after], autojunk=False
    )
    found: list[str] = []
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        gone = [line for line in before[i1:i2] if line.strip()]
        come = [line for line in after[j1:j2] if line.strip()]
        if kind == "equal" or not (gone or come):
            continue
        ahead = next((line for line in reversed(after[:j1]) if line.strip()), "")
        if found and found[-1][2:] != ahead:
            found += ["", f"  {ahead}"]
        elif not found:
            found.append(f"  {ahead}")
        found += [f"- {line}" for line in gone] + [f"+ {line}" for line in come]
    return found


def written(page: str) -> str:
    """The page with the changes of the engine today."""
    block = "\n".join(["", "```diff", *changes("engine"), "```", ""])
    before, rest = page.split("<!-- changes: engine -->\n")
    return f"{before}<!-- changes: engine -->\n{block}\n<!-- end -->{rest.split('<!-- end -->')[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
