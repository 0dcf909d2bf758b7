"""Private names of torch's process groups are used in one file, until torch has public ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire

ROOT = Path(thinwire.__file__).parent
HOME = "comm/elastic.py"
REPLACED_IN = (2, 15)
"""First release of torch whose `reconfigure` may replace the private names: 2.14 may have it, too
new to rest on. Its helpers are private in torch.distributed; see PyTorch's pull request 186298."""
C10D = dist.distributed_c10d
GLOO = C10D.ProcessGroupGloo
OWNERS = [dist, C10D, dist.ProcessGroup, dist.Work, GLOO, GLOO._Options]
PRIVATE = {
    "_distributed_c10d",
    *(name for owner in OWNERS for name in dir(owner) if re.match("_[^_]", name)),
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Each private name of torch's groups that the code reads, imports or writes as text."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                continue
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                names = [name]
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                names = [*module.split("."), *(alias.name for alias in node.names)]
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case _:
                continue
        yield from PRIVATE.intersection(names)


def test_private_names_of_groups_are_in_one_file() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in sorted(ROOT.rglob("*.py"))
        if (names := {*private_names(ast.parse(path.read_text(encoding="utf-8")))})
    }
    assert found[HOME] >= {"_new_process_group_helper", "_get_backend", "_set_default_timeout"}
    others = {path: names for path, names in found.items() if path != HOME}
    assert not others, f"move these into src/thinwire/{HOME}, behind a function"


def test_private_names_are_seen_however_they_are_written() -> None:
    for code in (
        "group._get_backend(device)",
        "dist.distributed_c10d._world",
        "getattr(options, '_timeout', None)",
        "from torch._C._distributed_c10d import Store",
        "import torch._C._distributed_c10d as c10d",
        "from torch.distributed.distributed_c10d import _get_default_group",
    ):
        assert [*private_names(ast.parse(code))], code
    assert [*private_names(ast.parse("from torch.distributed import Store; self._timeout"))] == []


def test_torch_has_no_public_names_yet_for_groups_that_grow_and_shrink() -> None:
    owners = [dist, dist.ProcessGroup, GLOO]
    offered = [owner.__name__ for owner in owners if hasattr(owner, "reconfigure")]
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert not offered or release < REPLACED_IN, (
        f"torch {torch.__version__} has reconfigure() of {', '.join(offered)}: make the groups of "
        f"members with it in src/thinwire/{HOME}, drop the private names that it replaces once the "
        "oldest supported torch has it, or raise REPLACED_IN and say what it still lacks"
    )
