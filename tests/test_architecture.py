"""Arrows point down: which package may import which, and who may speak to other ranks."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from tests.processes import ran, ran_code

ROOT = Path(thinwire.__file__).parent
REPOSITORY = Path(__file__).parents[1]
BASE = {"errors", "_version", "_validate", "_names", "_watchdog", "_wording", "_launched", "_files"}
BASE |= {"_at_exit", "_devices"}
MATHS = BASE | {"layout", "schedules", "kernels", "core"}
METHODS = MATHS | {"wire", "compress"}
MAY_IMPORT = {
    **{name: set() for name in BASE},
    "_validate": {"_wording"},
    "schedules": BASE,
    "task": BASE,
    "page": BASE,
    "logs": BASE | {"page"},
    # arithmetic of messages, without torch
    "layout": BASE,
    # loops, in three bodies behind one signature
    "kernels": BASE | {"layout"},
    "core": BASE | {"layout", "kernels"},
    # bytes: neither methods nor ranks
    "wire": BASE | {"layout", "kernels", "core"},
    # methods of compression, which speak to nobody
    "compress": MATHS | {"wire"},
    "comm": BASE | {"layout"},
    "exchange": METHODS | {"comm"},
    "local": METHODS | {"comm", "exchange", "members"},
    # DGCMomentum is an optimizer that exchanges gradients itself, hence exchange and comm
    "optim": METHODS | {"comm", "exchange"},
    "amp": BASE | {"core", "comm", "exchange"},
    "step": BASE | {"core"},
    "pipeline": BASE | {"core", "comm"},
    "checkpoint": BASE | {"comm", "core"},
    # each rank's state goes into a file of its own; a strategy inside a framework's loop
    "integrations": BASE
    | {"core", "comm", "exchange", "local", "optim", "checkpoint", "strategy", "logs"}
    | {"members", "sampler"},
    # the only one that knows two methods at once
    "strategy": METHODS
    | {"comm", "exchange", "local", "members", "optim", "amp", "step", "pipeline", "checkpoint"}
    | {"stream"},
    # members that come and go: who meets, who is admitted
    "members": BASE | {"comm", "exchange", "page"},
    "sampler": BASE | {"comm", "members"},
    # versions of a model, for who does not train
    "stream": BASE | {"kernels", "comm", "core", "checkpoint", "members"},
    "cli": BASE | {"tools", "strategy", "stream", "members"},
    "__main__": {"cli"},
}
TOOLS = {
    # commands and what they share: seconds and links are read alike
    "app": {"network"},
    "network": set(),
    "run": {"app", "network", "doctor"},
    "report": {"run"},
    "up": {"run", "doctor", "report"},
    "compare": {"app", "network", "run", "report"},
    "planning": {"app", "network", "run", "report", "compare", "doctor"},
    # looks at what is between machines before anything of the library is made
    "doctor": set(),
}
"""The tools, and which of the others each may import."""
OF_THE_LIBRARY = {
    "comm.Group": "a trainer reads its count of bytes on the wire",
    "comm.sockets.listeners": "the doctor looks at which addresses gloo listens on",
    "wire.message.WIRE_VERSION": "the doctor compares it between machines",
}
"""Internals of the library that tools import all the same, and why."""
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def tool_of(path: Path) -> str:
    return path.relative_to(ROOT / "tools").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """What a file imports of ours, without `thinwire.`; a name of a module is `module.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("thinwire.") for name in names if name.startswith("thinwire.")}
    return found


def is_public(name: str) -> bool:
    """Whether users have it, from `thinwire` itself or from one of its public modules."""
    module, _, last = name.rpartition(".")
    if thinwire._HOMES.get(last) == f"thinwire.{module}" or name in thinwire.__all__:
        return True
    return (
        module in thinwire._MODULES
        and last in importlib.import_module(f"thinwire.{module}").__all__
    )


def test_imports_point_down() -> None:
    for path in FILES:
        if (own := room(path)) != "tools":
            rooms = {name.split(".")[0] for name in imported(path)}
            assert rooms - {own} <= MAY_IMPORT[own], path
        if own == "optim" and path.name != "dgc_momentum.py":
            assert "exchange" not in rooms, path


def test_tools_import_public_names() -> None:
    """And arithmetic of messages, and the small modules that have no room of their own."""
    for path in (path for path in FILES if room(path) == "tools"):
        names = {name for name in imported(path) if name.split(".")[0] not in BASE | {"layout"}}
        tools = {name.split(".")[1] for name in names if name.startswith("tools.")}
        assert tools - {tool_of(path)} <= TOOLS.get(tool_of(path), set()), path
        others = {name for name in names if not name.startswith("tools.") and not is_public(name)}
        assert others <= OF_THE_LIBRARY.keys(), path


def test_only_comm_speaks_to_other_ranks() -> None:
    """Types of torch.distributed may be named in signatures; calls belong to comm (the
    tools train as users do and ask torch itself, members meet before there is a group)."""
    trainers = [ROOT / "tools" / name for name in ("run", "doctor")]
    for path in FILES:
        if room(path) in {"comm", "members"} or any(map(path.is_relative_to, trainers)):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not any(name.startswith(("dist.", "torch.distributed.")) for name in called), path


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Inside packages too; what is only needed for types is there at run time as well."""
    done = ran([sys.executable, "-m", "benchmarks.structure", "--circles"], cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("src", {"tests", "benchmarks", "research"}),
        ("tests", {"benchmarks", "research"}),
        ("benchmarks", {"tests", "research"}),
        ("research", {"tests"}),
    ],
)
def test_benchmarks_and_tests_are_strangers(folder: str, others: set[str]) -> None:
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not others & {name.partition(".")[0] for name in names}, path


def test_no_test_reaches_into_the_parts_of_an_engine() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py")}
    assert [path.name for path, text in texts.items() if re.search(r"[.]_parts\b", text)] == []


def test_all_names_exist() -> None:
    assert set(thinwire.__all__) == {"__version__", *thinwire._MODULES, *thinwire._HOMES}
    for_types = ast.parse(Path(str(thinwire.__file__)).read_text(encoding="utf-8"))
    named = [
        alias.name
        for node in ast.walk(for_types)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("thinwire")
        for alias in node.names
    ]
    assert set(named) == set(thinwire.__all__)
    assert dir(thinwire) == sorted(thinwire.__all__)
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = thinwire.nothing


def test_importing_thinwire_does_not_import_torch() -> None:
    code = "import sys, thinwire, thinwire.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_packages_are_attributes_after_the_import_alone() -> None:
    """In a process of its own: here other tests have imported them."""
    code = (
        "import thinwire as tw; tw.Engine.train_step, tw.checkpoint.load, "
        "tw.integrations.PerRankState, tw.optim.SGD, tw.amp, tw.errors, tw.schedules"
    )
    done = ran_code(code)
    assert done.stderr == ""


def _functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _catches_all(function: ast.FunctionDef) -> bool:
    """It has a block, or in its loop, that no exception passes."""
    caught = ""
    for node in [*function.body, *(n for loop in function.body for n in getattr(loop, "body", []))]:
        if isinstance(node, ast.Try):
            caught += " ".join(ast.unparse(one.type) for one in node.handlers if one.type)
        elif isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[-1]):
            caught += ast.unparse(node.items[-1])
    return "Exception" in caught


def test_no_exception_passes_the_border_of_a_thread_of_ours() -> None:
    """It is handed to who waits, or logged where nobody does; the library's own server does so."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    everywhere = {name: f for tree in trees.values() for name, f in _functions(tree).items()}
    threads, uncaught = 0, []
    for path, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) not in ("threading.Thread", "threading.Timer", "Thread"):
                continue
            [target] = [word.value for word in call.keywords if word.arg == "target"]
            name, threads = ast.unparse(target).rpartition(".")[2], threads + 1
            of = _functions(tree).get(name) or everywhere.get(name)
            uncaught += [f"{path.stem}.{name}"] if of is None or not _catches_all(of) else []
    assert threads > 10
    assert uncaught == ["server.serve_forever"]
