"""Counts of the structure of the source, with a ceiling for each.

    python -m benchmarks.structure            # a table
    python -m benchmarks.structure --check    # fails where a count is above its ceiling, or a
                                              # ceiling above that of the commit before
    python -m benchmarks.structure --write    # lowers ceilings to the counts; raises none
    python -m benchmarks.structure --list     # the files on the way of a step, as JSON

Needs no network. The way of a step is traced in the third step of two gloo ranks on this machine,
after everything has been set up: every function of ours that is called counts with its file.
Named functions leave out lambdas and comprehensions; depth is that of our own calls.
Ceilings are in structure.json beside this file. They only fall. Those of agreements are for
tests/laws/test_agreements.py.
"""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import thinwire as tw
from thinwire.compress import protocol
from thinwire.tools.run.launch import free_port

SOURCE = Path(tw.__file__).parent
TESTS = SOURCE.parents[1] / "tests"
CEILINGS = Path(__file__).with_suffix(".json")
STEP = 3
TOOLS = ("tools",)
"""Packages of commands; all others are the library."""
PUBLIC = ("optim", "schedules", "amp", "errors", "integrations")
"""Modules whose names users import; every other module is internal."""
KINDS = {
    "own": "DGCMomentum.step",
    "dense": "a dense train_step",
    "dgc": "a DGC train_step",
    "averaging": "an averaging in an engine",
}
"""Steps that are traced: an optimizer's own, and those of engines."""
PROTOCOLS = ("Config", "Compression", "Compressor", "ChangeCompression")
"""Those of `thinwire.compress.protocol` that a method of compression answers, for gradients and for
changes."""


def files() -> list[Path]:
    """All of ours."""
    return sorted(SOURCE.rglob("*.py"))


@dataclass
class Walk:
    """What a piece of work calls of ours."""

    functions: dict[str, int] = field(default_factory=dict)
    """Functions by file."""
    named: int = 0
    """Functions that have a name."""
    depth: int = 0
    """Most calls of ours inside each other."""


def called_in(work: Callable[[], Any]) -> Walk:
    """Return what `work` calls in this thread and those of the backward pass."""
    seen: set[tuple[str, str]] = set()
    walk = Walk()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        seen.add((str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname))
        files = [inner.f_code.co_filename for inner, _ in walk_stack(frame)]
        walk.depth = max(walk.depth, sum(file.startswith(str(SOURCE)) for file in files))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    for name, _ in sorted(seen):
        walk.functions[name] = walk.functions.get(name, 0) + 1
    walk.named = sum(not function.endswith(">") for _, function in seen)
    return walk


def way(rank: int, port: int, kind: str, answers: Any) -> None:
    """The files that one step crosses, of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    steps = _own_steps(model, rank) if kind == "own" else _engine_steps(model, rank, kind)
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


def _engine_steps(model: nn.Module, rank: int, kind: str) -> Iterator[Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    local = tw.LocalSGD(1, compression=tw.Quantized(1)) if kind == "averaging" else None
    dgc = tw.DGC() if kind == "dgc" else None
    strategy = tw.DistributedStrategy(dgc=dgc, localsgd=local)
    engine = strategy.prepare(model, optimizer, nn.functional.cross_entropy)
    for step in range(STEP):
        x, y = _batch(rank, step)
        yield partial(engine.train_step, x, y)


def traced(kind: str) -> Walk:
    """See `way`, in two processes; `kind` is one of `KINDS`."""
    context = mp.get_context("spawn")
    port = free_port()
    answers = context.Queue()
    ranks = [context.Process(target=way, args=(rank, port, kind, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found: Walk = answers.get(timeout=300)
    for process in ranks:
        process.join()
    return found


def lines_of(path: Path) -> int:
    """With comments and empty ones."""
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_of_code(path: Path) -> int:
    """Without comments, empty lines and docstrings."""
    text = path.read_text(encoding="utf-8")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for entry in node.body if isinstance(node, documented) else []:
            if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant):
                skipped |= set(range(entry.lineno, (entry.end_lineno or entry.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in skipped
        for number, line in lines
    )


def package_of(path: Path) -> str:
    """The package right under ours; "face" for the modules that are in none."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "face"


def longest_class() -> int:
    """In lines."""
    found = 0
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                found = max(found, node.end_lineno - node.lineno + 1)
    return found


def members_of_protocols() -> int:
    """How many names a method of compression must answer, for gradients and for changes."""
    found = []
    for name in PROTOCOLS:
        kind = getattr(protocol, name)
        names = {*vars(kind), *inspect.get_annotations(kind)}
        if getattr(kind, "_is_protocol", False):
            found += [name for name in names if not name.startswith("_")]
        else:
            found += [name for name in names if name in kind.__abstractmethods__]
    return len(found)


def classes_under(kind: type) -> int:
    """Its own and those of ours that it inherits from."""
    return sum(base.__module__.startswith("thinwire") for base in kind.__mro__)


def tests_of_internals() -> list[str]:
    """Test files that import a module which is not public."""

    def internal(name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "thinwire" and len(parts) > 1 and parts[1] not in PUBLIC

    found = []
    for path in sorted(TESTS.rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
        if any(map(internal, names)):
            found.append(str(path.relative_to(TESTS)))
    return found


def counted() -> dict[str, int]:
    """All counts without a run, by what they count."""
    by_package: dict[str, int] = {}
    for path in files():
        package = package_of(path)
        by_package[package] = by_package.get(package, 0) + lines_of(path)
    tools = sum(by_package.get(package, 0) for package in TOOLS)
    return {
        **{f"lines of {package}": lines for package, lines in sorted(by_package.items())},
        "lines of the library": sum(by_package.values()) - tools,
        "lines of the tools": tools,
        "lines of code": sum(map(lines_of_code, files())),
        "source files": len(files()),
        "lines of the longest file": max(map(lines_of, files())),
        "lines of the longest class": longest_class(),
        "circles of imports": len(circles()),
        "members of the protocols of methods": members_of_protocols(),
        "classes under Lamb": classes_under(tw.optim.Lamb),
        "test files that import internals": len(tests_of_internals()),
        "lines of tests": sum(map(lines_of, TESTS.rglob("*.py"))),
    }


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
    """Return those of the modules `names` that are imported, in functions and for types too."""
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


def ways() -> dict[str, int]:
    """Files, functions and depth on the way of a step, by the kind of step."""
    found = {}
    for kind, text in KINDS.items():
        walk = traced(kind)
        found[f"files on the way of {text}"] = len(walk.functions)
        found[f"functions on the way of {text}"] = sum(walk.functions.values())
        found[f"named functions on the way of {text}"] = walk.named
        found[f"depth of {text}"] = walk.depth
    return found


def raised(ceilings: dict[str, int]) -> list[str]:
    """Return one line per ceiling that is above that of the commit before; none without git."""
    command = ["git", "show", f"HEAD:benchmarks/{CEILINGS.name}"]
    shown = subprocess.run(
        command, check=False, cwd=CEILINGS.parent, capture_output=True, text=True
    )
    before: dict[str, int] = json.loads(shown.stdout) if shown.returncode == 0 else {}
    return [
        f"{text}: its ceiling is {ceilings[text]}, above {most} of the commit before"
        for text, most in before.items()
        if ceilings.get(text, most) > most
    ]


def above(counts: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """Return one line per problem: a count above its ceiling, or without one."""
    wrong = []
    for text, count in counts.items():
        if text not in ceilings:
            wrong.append(f"{text}: {count}, and no ceiling: enter one in {CEILINGS.name}")
        elif count > ceilings[text]:
            wrong.append(f"{text}: {count}, at most {ceilings[text]} allowed")
    return wrong


def main() -> None:
    """Print what was counted, and compare it with the ceilings."""
    if "--list" in sys.argv:
        print(json.dumps({kind: traced(kind).functions for kind in KINDS}, indent=1))
        print(json.dumps({"circles": circles(), "tests": tests_of_internals()}, indent=1))
        return
    counts = {**counted(), **ways()}
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    for text, count in counts.items():
        print(f"{count:6d}  {text}  (ceiling {ceilings.get(text, 'none')})")
    if "--write" in sys.argv:
        ceilings |= {text: min(count, ceilings.get(text, count)) for text, count in counts.items()}
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
    if "--check" in sys.argv and (wrong := [*above(counts, ceilings), *raised(ceilings)]):
        sys.exit("\n".join(["", *wrong, "A change that adds a path removes one."]))


if __name__ == "__main__":
    main()
