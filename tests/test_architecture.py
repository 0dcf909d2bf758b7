"""Arrows point down: which package may import which, and who may speak to other ranks."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from benchmarks.structure import circles

ROOT = Path(thinwire.__file__).parent
BASE = {"errors", "_version", "_validate", "_names", "_aside", "_wording", "_launched", "_files"}
MATHS = BASE | {"layout", "schedules", "kernels", "core"}
METHODS = MATHS | {"wire", "compress"}
MAY_IMPORT = {
    "errors": set(),
    "_version": set(),
    "_validate": {"_wording"},
    "_wording": set(),
    "_names": set(),
    "_aside": set(),
    "_launched": set(),
    "_files": set(),
    "schedules": BASE,
    "task": BASE,
    "logs": BASE,
    # arithmetic of messages, without torch
    "layout": BASE,
    # loops, in three bodies behind one signature
    "kernels": BASE | {"layout"},
    "core": BASE | {"layout", "kernels"},
    # bytes: neither methods nor ranks
    "wire": BASE | {"layout", "kernels", "core"},
    # methods of compression, which speak to nobody
    "compress": MATHS | {"wire"},
    "comm": BASE,
    "exchange": METHODS | {"comm"},
    "local": METHODS | {"comm", "exchange", "members"},
    # DGCMomentum is an optimizer that exchanges gradients itself, hence exchange and comm
    "optim": METHODS | {"comm", "exchange"},
    "amp": BASE | {"core", "comm", "exchange"},
    "step": BASE | {"core"},
    "pipeline": BASE | {"core", "comm"},
    "checkpoint": BASE | {"comm"},
    # each rank's state goes into a file of its own; a strategy inside a framework's loop
    "integrations": BASE | {"core", "comm", "exchange", "local", "optim", "checkpoint", "strategy"},
    # the only one that knows two methods at once
    "strategy": METHODS
    | {"comm", "exchange", "local", "members", "optim", "amp", "step", "pipeline", "checkpoint"},
    "lab": BASE | {"schedules", "optim", "amp", "checkpoint", "strategy", "local", "task", "comm"},
    # numbers alone: without torch
    "planning": BASE | {"layout", "lab", "strategy"},
    # steps of many ranks, on the network of the plan
    "simulation": BASE | {"layout", "planning"},
    # looks at what is between machines before anything of the library is made
    "doctor": BASE | {"wire", "comm"},
    # members that come and go: who meets, who is admitted
    "members": BASE | {"comm", "exchange"},
    "cli": BASE | {"lab", "planning", "strategy", "doctor", "members"},
    "__main__": {"cli"},
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "thinwire" and len(parts) > 1:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert imported_rooms(path) - {room(path)} <= MAY_IMPORT[room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_comm_speaks_to_other_ranks(path: Path) -> None:
    """Types of torch.distributed may be named in signatures; calls belong to comm (lab trains as
    users do, doctor asks torch itself, members meet before there is a group)."""
    if room(path) in {"comm", "lab", "doctor", "members"}:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith(("dist.", "torch.distributed."))
    ]
    assert calls == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Inside packages too; what is only needed for types is there at run time as well."""
    assert circles() == []


def test_all_names_what_there_is() -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, encoding="utf-8"
    )
    assert done.stderr == ""
