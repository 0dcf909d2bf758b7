"""The examples of docstrings run as they stand, each in names of its own, on one rank."""

import ast
import contextlib
import functools
import importlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from tests.integrations.packages import needs
from tests.members.places import TOKEN, meeting_place

SOURCE = Path(tw.__file__).parent
EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n|\n)+)", re.MULTILINE)
ADDRESS = "tcp://10.0.0.1:29400"
PACKAGES = {"lightning": "lightning", "transformers": "transformers", "logs": "tensorboard"}
"""By module, the optional package without which its examples cannot run."""
X, Y = torch.randn(8, 4), torch.randn(8, 4)


def examples() -> Iterator[Any]:
    """Module, name and code of every example, found without an import."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(["thinwire", *path.relative_to(SOURCE).with_suffix("").parts])
        package = PACKAGES.get(path.stem)
        marks = (pytest.mark.integrations, needs(package)) if package else ()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                for code in EXAMPLE.findall(f"{ast.get_docstring(node) or ''}\n"):
                    text = re.sub("^    ", "", code, flags=re.MULTILINE)
                    label = f"{module}.{node.name}"
                    yield pytest.param(module, node.name, text, id=label, marks=marks)


def step(names: dict[str, Any], *_: object) -> None:
    names["loss_fn"](names["model"](X), Y).backward()
    names["optimizer"].step()
    if "members" in names:
        names["members"].leave()


LATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "loss": lambda names: names["loss_fn"](names["model"](X), Y),
    "engine": lambda names: tw.DistributedStrategy().prepare(
        names["model"], names["optimizer"], names["loss_fn"]
    ),
    "sync": lambda names: tw.local_sgd(
        names["model"], names["optimizer"], tw.LocalSGD(4, round_seconds=9)
    ),
    **dict.fromkeys(
        ("train", "train_step", "framework_loop"), lambda names: functools.partial(step, names)
    ),
}
"""Names that are made only where an example uses them, since a model takes one engine."""


def given(kind: str) -> dict[str, Any]:
    """Names of a script that an example may use, and the public ones."""
    public = {name: getattr(module, name) for module in (tw, tw.optim) for name in module.__all__}
    model = module = nn.Sequential()
    model.add_module("blocks", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    inputs, batch, targets, data = X, X, Y, TensorDataset(X, Y)
    loader, sampler = DataLoader(data, 4), tw.ShardedSampler(data)
    make = tw.optim.DGCMomentum if kind in ("Attached", "PerRankState") else torch.optim.SGD
    optimizer, head = make(model.parameters(), 0.1), nn.Linear(4, 4)
    loss_fn, penalty, config = nn.functional.mse_loss, lambda model: 0.0, tw.LocalSGD(1, 0)
    my_batches = my_evaluate = args = lambda *_: None
    accelerator, Trainer = MagicMock(), MagicMock()
    DistributedDataParallel = nn.parallel.DistributedDataParallel
    rank, path, log = 0, Path("file"), logging.getLogger("test")
    return public | globals() | locals()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples read."""
    folder, names = tmp_path_factory.mktemp("saved"), given("")
    engine = LATE["engine"](names)
    engine.train_step(X, Y)
    engine.save(folder / "checkpoints", extra={"sampler": names["sampler"]})
    tw.checkpoint.export(folder / "checkpoints", folder / "pretrained.safetensors")
    tw.DistributedStrategy(dgc=tw.DGC()).save(folder / "strategy.yaml")
    (folder / "token").write_bytes(TOKEN)
    (folder / "token").chmod(0o600)
    return folder


@pytest.mark.parametrize(("module", "name", "code"), examples())
def test_the_example_of_a_docstring_runs(
    module: str, name: str, code: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = {**vars(importlib.import_module(module)), **given(name)}
    uses = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    made = {node.id for node in uses if isinstance(node.ctx, ast.Store)}
    used = {node.id for node in uses} - made
    with contextlib.ExitStack() as ends:
        if "DistributedDataParallel" in used:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ends.callback(dist.destroy_process_group)
        if ADDRESS in code:
            code = code.replace(ADDRESS, ends.enter_context(meeting_place()))
        names |= {late: make(names) for late, make in LATE.items() if late in used}
        if "sync" in used:
            ends.enter_context(names["sync"])
        exec(compile(code, f"the example of {module}.{name}", "exec", dont_inherit=True), names)
    if "def make(" in code:
        names["make"](0)


def test_every_example_of_the_sources_is_found() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    assert sum(text.count("Example::") for text in texts) == len(list(examples())) > 40
