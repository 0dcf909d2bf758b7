"""The text of an ensemble in a folder, the modules of each worker, and where batches begin."""

import json
import sysconfig
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gaps import SIZES, Cell
from thinwire.tools.run.built_in import seed_of
from thinwire.tools.run.text import read_folder, read_standard_library

PARTS = ("train", "validation", "held_out")
HELD_OUT_SEQUENCES = 512
_MOST_WORKERS = 16


def write(folder: Path, source: Path | None) -> None:
    """Write the parts of a text: of a folder, or of Python's standard library."""
    corpus = read_folder(source) if source else read_standard_library()
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        (folder / part).write_bytes(getattr(corpus, part))
    root = source or Path(sysconfig.get_paths()["stdlib"])
    (folder / "spans.json").write_text(json.dumps(spans_by_worker(root, corpus.train)))


def spans_by_worker(root: Path, train: bytes) -> list[list[tuple[int, int]]]:
    """Return starts and ends in the text of whole folders, dealt to the workers by size.

    Files directly below the root are grouped by their first letter.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if any(part.endswith("-packages") for part in parts) or not path.stat().st_size:
            continue
        content = path.read_bytes()
        begin = train.find(content)
        if begin >= 0:
            name = parts[0] if len(parts) > 1 else f"*{parts[0][0]}"
            found[name].append((begin, begin + len(content)))
    by_size = sorted(found.values(), key=lambda spans: -sum(b - a for a, b in spans))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(_MOST_WORKERS)]
    for spans in by_size:
        min(dealt, key=lambda own: sum(b - a for a, b in own)).extend(spans)
    return dealt


class Texts:
    """Text of a folder that `write` made, with one part held out."""

    def __init__(self, folder: Path, part: str) -> None:
        self.train, self.held_out = (_bytes_of(folder / name) for name in ("train", part))
        self.spans = json.loads((folder / "spans.json").read_text())

    def starts(self, cell: Cell, worker: int, *, own_folders: bool) -> Tensor:
        """Return where a worker's sequences begin, shape (steps, batch), as `NextByte` does."""
        context = SIZES[cell.size].context
        random = torch.Generator().manual_seed(seed_of(cell.seed, worker))
        shape = (cell.steps, cell.batch)
        if not own_folders:
            return torch.randint(len(self.train) - context, shape, generator=random)
        own = [span for spans in self.spans[worker :: cell.workers] for span in spans]
        places = torch.cat([torch.arange(a, b - context) for a, b in own if b - a > context])
        return places[torch.randint(len(places), shape, generator=random)]

    def held_out_starts(self, cell: Cell) -> Tensor:
        """Return where the held-out sequences of a seed begin."""
        fixed = torch.Generator().manual_seed(cell.seed)
        end = len(self.held_out) - SIZES[cell.size].context
        return torch.randint(end, (HELD_OUT_SEQUENCES,), generator=fixed)


def _bytes_of(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
