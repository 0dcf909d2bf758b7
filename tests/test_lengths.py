"""The documents stay short: `make check` runs `python -m tests.test_lengths`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = {"README.md": 7 * 1024, "CHANGELOG.md": 4 * 1024}
"""Bytes of a file."""
PAGES = 220 * 1024
"""Bytes of docs/*.md and docs/notes/*.md together."""
WORDS = 20
"""Entries of the glossary."""


def too_long() -> list[str]:
    """One line for every limit that is exceeded."""
    sizes = {name: ((ROOT / name).stat().st_size, limit) for name, limit in LIMITS.items()}
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notes").glob("*.md")]
    sizes["docs/*.md and docs/notes/*.md"] = (sum(page.stat().st_size for page in pages), PAGES)
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = len(re.findall(r"^\| ", glossary, re.MULTILINE)) - 1
    sizes["entries of docs/glossary.md"] = (words, WORDS)
    return [
        f"{name}: {size:,}, limit {limit:,}"
        for name, (size, limit) in sizes.items()
        if size > limit
    ]


def test_documents_are_within_their_lengths() -> None:
    assert too_long() == []


if __name__ == "__main__":
    print("\n".join(too_long()) or "documents are within their lengths")
    sys.exit(bool(too_long()))
