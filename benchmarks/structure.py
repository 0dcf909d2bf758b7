"""How much of the source a gradient and a reader cross: files on the way, files that name a method,
circles.

    python -m benchmarks.structure

Prints a table; needs no network. The way of a gradient is traced in the third step of two gloo
ranks on this machine, after everything has been set up: every function of ours that is called
counts with its file.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import thinwire as tw
from thinwire.lab.run.ranks import free_port

SOURCE = Path(tw.__file__).parent
STEP = 3


def files() -> list[Path]:
    """All of ours."""
    return sorted(SOURCE.rglob("*.py"))


def called_in(work: Callable[[], Any]) -> dict[str, int]:
    """By file of ours, how many of its functions `work` calls in this thread and those of the
    backward pass.
    """
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            seen.add((str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    found: dict[str, int] = {}
    for name, _ in seen:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def way(rank: int, port: int, engine: bool, answers: Any) -> None:
    """The files that one gradient crosses, of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    steps = _engine_steps(model, rank) if engine else _own_steps(model, rank)
    for _ in range(STEP - 1):
        next(steps)()
    found = called_in(next(steps))
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 256, generator=generator), torch.randint(4, (8,), generator=generator)


def _own_steps(model: nn.Module, rank: int) -> Iterator[Callable[[], Any]]:
    optimizer = tw.optim.DGCMomentum(model.named_parameters(), lr=0.1)
    for step in range(STEP):
        x, y = _batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        yield optimizer.step


def _engine_steps(model: nn.Module, rank: int) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    strategy = tw.DistributedStrategy(dgc=tw.DGC())
    engine = strategy.prepare(model, optimizer, nn.functional.cross_entropy)
    for step in range(STEP):
        x, y = _batch(rank, step)
        yield lambda x=x, y=y: engine.train_step(x, y)


def traced(*, engine: bool) -> dict[str, int]:
    """See `way`, in two processes."""
    context = mp.get_context("spawn")
    port = free_port()
    answers = context.Queue()
    ranks = [context.Process(target=way, args=(rank, port, engine, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found: dict[str, int] = answers.get(timeout=300)
    for process in ranks:
        process.join()
    return found


def naming(word: str) -> list[str]:
    """The files in which a word stands, in code or text, as a word or a part of a name."""
    pattern = re.compile(word, re.IGNORECASE)
    return [
        str(p.relative_to(SOURCE)) for p in files() if pattern.search(p.read_text(encoding="utf-8"))
    ]


def circles() -> list[list[str]]:
    """Groups of modules that import each other in a circle when they are loaded, inside packages
    too.
    """
    modules = {_module(path): path for path in files()}
    graph = {name: _imports(path, modules.keys()) for name, path in modules.items()}
    return [sorted(group) for group in _strong(graph) if len(group) > 1]


def _module(path: Path) -> str:
    parts = ("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, names: Set[str]) -> set[str]:
    """Which of the modules `names` are imported, in functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole if whole <= names else whole | {str(node.module)}
    return (found & names) - {_module(path)}


def _strong(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts."""

    def reach(start: str) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reached = {name: reach(name) for name in graph}
    parts: list[set[str]] = []
    for name in graph:
        if not any(name in part for part in parts):
            parts.append({other for other in reached[name] if name in reached[other]})
    return parts


def main() -> None:
    """Print what was counted."""
    own, whole = traced(engine=False), traced(engine=True)
    rows = {
        "files that one gradient crosses, DGCMomentum.step": len(own),
        "files that one gradient crosses, engine.train_step with dgc": len(whole),
        "source files that name dgc": len(naming("dgc")),
        "circles of imports": len(circles()),
        "source files": len(files()),
        "lines of source": sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files()),
    }
    for text, count in rows.items():
        print(f"{count:6d}  {text}")
    if "--list" in sys.argv:
        print(
            json.dumps(
                {"step": own, "train_step": whole, "dgc": naming("dgc"), "circles": circles()},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
