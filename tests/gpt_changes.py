"""What changes where examples/gpt/plain.py is moved, as docs/migrating.md shows it: python -m
tests.gpt_changes writes it there.
"""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "migrating.md"
MOVED = {"attach": "plain", "engine": "plain", "local": "plain", "muon_local": "engine"}
"""Each way, and the script with which it is compared."""
SHOWN = ("engine", "muon_local")
"""Those whose changes the page shows."""


def lines_of(name: str) -> list[str]:
    """The script without its docstring."""
    text = (ROOT / "examples" / "gpt" / f"{name}.py").read_text(encoding="utf-8")
    return text.split('"""', 2)[2].strip().splitlines()


def changes(name: str) -> list[str]:
    """The lines that go (-) and come (+), each with the line before it."""
    before, after = lines_of(MOVED[name]), lines_of(name)
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
    """The page with what changes today."""
    for name in SHOWN:
        block = "\n".join(["", "```diff", *changes(name), "```", ""])
        page, count = re.subn(
            rf"(<!-- changes: {name} -->\n).*?(\n<!-- end -->)",
            lambda match, block=block: match[1] + block + match[2],  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
        assert count == 1, f"{count} places for the changes of {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
