"""Settings whose docstrings say that they change no bit: ranks, a save and a load may differ."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import batch, digest, make_model, make_optimizer, prepared, train
from tests.toys import bits, descend

VALUES: dict[str, tuple[Any, Any]] = {"state_device": (None, "cpu"), "streams": (1, 2)}
"""Two values of each of these settings."""
SAME_ON_ALL_RANKS = {"streams"}
"""As its docstring says."""
CLAIM = re.compile(r"same bits|it may differ between|ranks may differ in it", re.IGNORECASE)


def docstrings() -> Iterator[str]:
    """All of public names and their public methods."""
    for name in tw.__all__:
        thing = getattr(tw, name)
        inner = vars(thing) if inspect.isclass(thing) or inspect.ismodule(thing) else {}
        public = [value for key, value in inner.items() if not key.startswith("_")]
        yield from (inspect.getdoc(one) or "" for one in (thing, *public) if callable(one))


def test_free_settings_of_docstrings_are_known() -> None:
    entries = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
    found = (entry for text in docstrings() for entry in entries.findall(text))
    assert {name for name, text in found if CLAIM.search(" ".join(text.split()))} == set(VALUES)


def run(
    rank: int, size: int, folder: str, kind: Any, setting: str, values: Any, engine: bool
) -> str:
    """Bits of nine steps with a value on each rank; after a load in the middle with others."""
    state: Any = None
    for first, last in ((0, 5), (5, 9)):
        own = values[first > 0][rank]
        config = kind(2, 0, **({"state_device": own} if setting == "state_device" else {}))
        told = {"streams": own} if setting == "streams" else {}
        if engine:
            field = "localsgd" if kind is tw.LocalSGD else "adaptive_localsgd"
            made = prepared(options=told, **{field: config})
            _ = made.load(folder) if first else None
            train(made, (), first, last)
            made.flush() if last == 9 else made.save(folder)
            made.close()
            continue
        model = make_model(plain=True)
        optimizer = make_optimizer(model, ())
        with tw.local_sgd(model, optimizer, config, **told) as sync:
            for part, values_of in zip((model, optimizer, sync), state or (), strict=False):
                part.load_state_dict(values_of)
            for x, y in (batch(step, rank) for step in range(first, last)):
                loss = nn.functional.cross_entropy(model(x), y)
                sync.observe(loss)
                descend(optimizer, loss)
            params = {key: value.clone() for key, value in model.state_dict().items()}
            state = params, optimizer.state_dict(), sync.state_dict()
    return digest(made) if engine else bits(model.parameters())


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("kind", [tw.LocalSGD, tw.AdaptiveLocalSGD])
@pytest.mark.parametrize("setting", VALUES)
def test_free_setting_may_differ_between_ranks_and_after_a_load(
    ranks: Pool, tmp_path: Path, kind: Any, setting: str, engine: bool
) -> None:
    a, b = VALUES[setting]
    cases = [[(a, a), (a, a)], [(a, a), (b, b)], [(b, b), (a, a)]]
    cases += [] if setting in SAME_ON_ALL_RANKS else [[(a, b), (b, a)]]
    found = [
        ranks.run(run, str(tmp_path / str(at)), kind, setting, case, engine, size=2)
        for at, case in enumerate(cases)
    ]
    assert len({text for texts in found for text in texts}) == 1
