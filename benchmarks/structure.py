"""Counts of the structure of the source, with a ceiling for each.

    python -m benchmarks.structure            # a table
    python -m benchmarks.structure --check    # fails where a count is above its ceiling, or a
                                              # ceiling above the least that it ever had
    python -m benchmarks.structure --write    # lowers ceilings to the counts; raises none
    python -m benchmarks.structure --list     # the files on the way of a step, as JSON
    python -m benchmarks.structure --circles  # circles of imports, as JSON

Needs no network. The unit is the token of code: no comments, docstrings or blank lines. The way of
a step is traced in the third step of two gloo ranks on this machine, after everything has been set
up: every function of ours that is called counts with its file. Named functions leave out lambdas
and comprehensions; depth is that of our own calls.
Ceilings are in structure.json beside this file. They only fall: one that is above the least value
in the history of that file needs a reason under "raised", which `--check` prints. Those of
agreements are for tests/laws/test_agreements.py.
"""

import argparse
import ast
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.ranks import on_ranks
from thinwire.compress import protocol

SOURCE = Path(tw.__file__).parent
ROOT = SOURCE.parents[1]
CEILINGS = Path(__file__).with_suffix(".json")
RAISED = "raised"
"""The key of the ceilings' file that has a reason for each ceiling above its least."""
MEASURING = ("benchmarks", "research")
TESTS = [ROOT / "tests", *(ROOT / folder / "tests" for folder in MEASURING)]
"""Folders of tests, which are counted in lines."""
BESIDE = (*MEASURING, "examples")
"""Folders of code that is not installed."""
TEXTS = ("html", "js", "css", "j2", "sh")
"""Suffixes of what is installed and is not Python."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
STEP = 3
TOOLS = ("tools",)
"""Packages of commands; all others are the library."""
PUBLIC = ("optim", "schedules", "amp", "errors", "integrations")
"""Modules whose names users import; every other module is internal."""
KINDS = {
    "own": "DGCMomentum.step",
    "dense": "a dense train_step",
    "dgc": "a DGC train_step",
    "averaging": "an averaging with Muon in an engine",
}
"""Steps that are traced: an optimizer's own, and those of engines."""
PROTOCOLS = ("Compression", "Arrived", "Computed")
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


def way(rank: int, size: int, kind: str) -> Walk:
    """Return what one step crosses on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    steps = _own_steps(model, rank) if kind == "own" else _engine_steps(model, rank, kind)
    for _ in range(STEP - 1):
        next(steps)()
    return called_in(next(steps))


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
    optimizer: torch.optim.Optimizer
    if kind == "averaging":
        optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=0.005)
        strategy = tw.DistributedStrategy(localsgd=tw.LocalSGD(1, compression=tw.Quantized(1)))
    else:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        strategy = tw.DistributedStrategy(dgc=tw.DGC() if kind == "dgc" else None)
    engine = strategy.prepare(model, optimizer, nn.functional.cross_entropy)
    for step in range(STEP):
        x, y = _batch(rank, step)
        yield partial(engine.train_step, x, y)


def traced(kind: str) -> Walk:
    """Return `way` of rank 0 of two; `kind` is one of `KINDS`."""
    found: Walk = on_ranks(way, 2, kind)[0]
    return found


def lines_of(path: Path) -> int:
    """With comments and empty ones."""
    return len(path.read_text(encoding="utf-8").splitlines())


def tokens_of(path: Path) -> int:
    """Of code, without comments, docstrings and layout; of other text its words and signs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return len(re.findall(r"\w+|[^\w\s]", text))
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for entry in node.body:
                if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant):
                    docstrings |= set(range(entry.lineno, (entry.end_lineno or entry.lineno) + 1))
    return sum(
        token.type not in LAYOUT and token.start[0] not in docstrings
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
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
            found += [name for name in names if name in getattr(kind, "__abstractmethods__", ())]
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
    for path in sorted(TESTS[0].rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
        if any(map(internal, names)):
            found.append(str(path.relative_to(TESTS[0])))
    return found


def private_names() -> list[str]:
    """Uses of a private name of ours in a package that does not define it."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    owners: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _defined(tree):
            owners.setdefault(name, set()).add(package_of(path))
    return [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and package_of(path) not in owners.get(node.attr, {package_of(path)})
    ]


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private methods and attributes of the classes in `tree`."""
    for kind in ast.walk(tree):
        for node in ast.walk(kind) if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name.startswith("_") and not name.startswith("__"):
                yield name


def counted() -> dict[str, int]:
    """All counts without a run, by what they count."""
    tests = {path for folder in TESTS for path in folder.rglob("*.py")}
    by_package: dict[str, int] = {}
    for path in files():
        package = package_of(path)
        by_package[package] = by_package.get(package, 0) + tokens_of(path)
    tools = sum(by_package.get(package, 0) for package in TOOLS)
    texts = [path for suffix in TEXTS for path in SOURCE.rglob(f"*.{suffix}")]
    groups = {
        "tokens of the library": sum(by_package.values()) - tools,
        "tokens of the tools": tools,
        f"tokens of {', '.join(TEXTS)}": sum(map(tokens_of, texts)),
    }
    for folder in BESIDE:
        own = (path for path in (ROOT / folder).rglob("*.py") if path not in tests)
        groups[f"tokens of {folder}"] = sum(map(tokens_of, own))
    return {
        **{f"tokens of {package}": tokens for package, tokens in sorted(by_package.items())},
        **groups,
        "tokens in all": sum(groups.values()),
        "source files": len(files()),
        "lines of the longest file": max(map(lines_of, files())),
        "lines of the longest class": longest_class(),
        "circles of imports": len(circles()),
        "private names across packages": len(private_names()),
        "members of the protocols of methods": members_of_protocols(),
        "classes under Lamb": classes_under(tw.optim.Lamb),
        "test files that import internals": len(tests_of_internals()),
        "lines of tests": sum(map(lines_of, tests)),
    }


def circles() -> list[list[str]]:
    """Groups of modules that import each other in a circle, of the library and of benchmarks."""
    own = (path for folder in MEASURING for path in (ROOT / folder).rglob("*.py"))
    modules = {_module(path): path for path in [*files(), *own]}
    graph = {name: _imports(path, modules.keys()) for name, path in modules.items()}
    return [sorted(group) for group in _strong(graph) if len(group) > 1]


def _module(path: Path) -> str:
    root = SOURCE.parent if path.is_relative_to(SOURCE) else ROOT
    parts = path.relative_to(root).with_suffix("").parts
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


def least(path: Path) -> dict[str, int]:
    """The least value that each ceiling of the file `path` had in any commit; none without git."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], check=False, cwd=path.parent, capture_output=True, text=True
        )
        return done.stdout if done.returncode == 0 else ""

    commits = git("log", "--format=%H", "--", path.name).split()
    text = git("show", *(f"{commit}:./{path.name}" for commit in commits)) if commits else ""
    found: dict[str, int] = {}
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        ceilings, end = decoder.raw_decode(text, at)
        at = end + len(text[end:]) - len(text[end:].lstrip())
        ceilings.pop(RAISED, None)
        for name, value in ceilings.items():
            found[name] = min(value, found.get(name, value))
    return found


def raised(path: Path) -> tuple[list[str], list[str]]:
    """Ceilings above the least of their history, a line each: with a reason, and without."""
    ceilings = json.loads(path.read_text())
    reasons = ceilings.pop(RAISED, {})
    named, wrong = [], []
    for name, value in least(path).items():
        if ceilings.get(name, value) > value and name in reasons:
            named.append(f"raised: {name}: {value} -> {ceilings[name]}: {reasons[name]}")
        elif ceilings.get(name, value) > value:
            wrong.append(f"{name}: its ceiling is {ceilings[name]}, and was {value}")
    return named, wrong


def above(counts: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """One line a problem: a count above its ceiling, or without one."""
    wrong = []
    for name, count in counts.items():
        if name not in ceilings:
            wrong.append(f"{name}: {count}, and no ceiling: enter one in {CEILINGS.name}")
        elif count > ceilings[name]:
            wrong.append(f"{name}: {count}, at most {ceilings[name]} allowed")
    return wrong


def main() -> None:
    """Print what was counted, and compare it with the ceilings."""
    parser = argparse.ArgumentParser(description="Counts of the structure of the source.")
    parser.add_argument("--check", action="store_true", help="fail where a count is too high")
    parser.add_argument("--write", action="store_true", help="lower ceilings to the counts")
    parser.add_argument("--list", action="store_true", help="what is on the way of a step")
    parser.add_argument("--circles", action="store_true", help="circles of imports alone")
    parser.add_argument("--history", type=Path, help="look at raises of this file alone")
    given = parser.parse_args()
    if given.list:
        print(json.dumps({kind: traced(kind).functions for kind in KINDS}, indent=1))
        found = {"circles": circles(), "private": private_names(), "tests": tests_of_internals()}
        print(json.dumps(found, indent=1))
        return
    if given.circles:
        print(json.dumps(circles()))
        return
    named, wrong = raised(given.history or CEILINGS)
    if given.history is None:
        counts = {**counted(), **ways()}
        ceilings = json.loads(CEILINGS.read_text())
        for name, count in counts.items():
            print(f"{count:6d}  {name}  (ceiling {ceilings.get(name, 'none')})")
        if given.write:
            for name, count in counts.items():
                ceilings[name] = min(count, ceilings.get(name, count))
            CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
        wrong += above(counts, ceilings)
    print("\n".join(named))
    if wrong and (given.check or given.history):
        sys.exit("\n".join(["", *wrong, "A change that adds a path removes one."]))


if __name__ == "__main__":
    main()
