"""A model under `torch.compile` is the model: names, checkpoints and patterns are those without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import thinwire as tw
from tests.api import export, named_parameters, plain_name, plain_names
from tests.api import names_matches as matches
from tests.ranks import Pool
from tests.strategy.training import batch, digest, flat, make_model, prepared, settings, train
from thinwire.errors import CheckpointMismatch

Wrap = Callable[[nn.Sequential], nn.Module]


def whole(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def inside(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


def plain(model: nn.Sequential) -> nn.Module:
    return model


COMPILED: dict[str, Wrap] = {"whole": whole, "inside": inside}


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """The wrappers are there, and nothing waits for the compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def wrapped(wrap: Wrap, *fields: str) -> Any:
    return prepared(wrap(make_model()), **settings(fields))


def ended(engine: Any, begin: int) -> str:
    train(engine, (), begin, begin + 3)
    found = digest(engine)
    engine.close()
    return found


KINDS = [(), ("dgc",), ("low_rank",), ("lamb",), ("gradient_merge",), ("localsgd", "dgc")]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "-".join(fields) or "dense")
@pytest.mark.parametrize("kind", COMPILED)
def test_run_goes_on_bit_for_bit(tmp_path: Path, kind: str, fields: tuple[str, ...]) -> None:
    ends = []
    for number, (before, after) in enumerate(
        [(plain, plain), (COMPILED[kind], plain), (plain, COMPILED[kind])]
    ):
        engine = wrapped(before, *fields)
        train(engine, (), 0, 3)
        engine.save(tmp_path / str(number))
        state = engine.state_dict()
        engine.close()
        for load in (
            lambda e, n=number: e.load(tmp_path / str(n)),
            lambda e, s=state: e.load_state_dict(s),
        ):
            engine = wrapped(after, *fields)
            load(engine)
            ends.append(ended(engine, 3))
    assert len(set(ends)) == 1


@pytest.mark.parametrize("kind", COMPILED)
def test_an_exported_model_has_the_names_without(tmp_path: Path, kind: str) -> None:
    engine = wrapped(COMPILED[kind])
    train(engine, (), 0, 2)
    engine.save(tmp_path)
    here = digest(engine)
    keys = list(engine.model.state_dict())
    engine.close()
    done = export(tmp_path, tmp_path / "model.safetensors")
    assert (done.tied, done.left_out) == ({}, ())
    file = load_file(tmp_path / "model.safetensors")
    assert set(file) == set(make_model().state_dict())
    make_model().load_state_dict(file)
    # and a file with the keys of the compiled model's own state_dict is one of this model
    save_file(
        dict(zip(map(_of(keys), file), file.values(), strict=True)), tmp_path / "raw.safetensors"
    )
    for name in ("model.safetensors", "raw.safetensors"):
        for after in (plain, COMPILED[kind]):
            engine = wrapped(after)
            engine.load_parameters(tmp_path / name)
            assert digest(engine) == here
            engine.close()


def _of(keys: list[str]) -> Callable[[str], str]:
    return {plain_name(key): key for key in keys}.__getitem__


def test_messages_name_parameters_without(tmp_path: Path) -> None:
    engine = wrapped(whole)
    engine.save(tmp_path)
    engine.close()
    engine = prepared(nn.Sequential(nn.Linear(8, 4)))
    for load in (engine.load, engine.load_parameters):
        with pytest.raises(CheckpointMismatch) as caught:
            load(tmp_path)
        assert "_orig_mod" not in str(caught.value)
    engine.close()


def test_patterns_are_over_the_names_without() -> None:
    for pattern in ("0.bias", "_orig_mod.0.bias"):
        model = whole(make_model())
        strategy = tw.DistributedStrategy(lamb=tw.LAMB(exclude_from_weight_decay=(pattern,)))
        engine = strategy.prepare(model, torch.optim.AdamW(model.named_parameters()))
        assert engine.optimizer.shared_settings()["excluded from weight decay"] == "0.bias"
        engine.close()
        model = whole(make_model())
        optimizer = tw.optim.Lamb(model.named_parameters(), exclude_from_weight_decay=(pattern,))
        assert optimizer.shared_settings()["excluded from weight decay"] == "0.bias"
    with pytest.raises(ValueError, match=r"matches no parameter name; did you mean '0.bias'"):
        tw.optim.Lamb(model.named_parameters(), exclude_from_weight_decay=("0.bia",))


def test_local_updates_go_on_with_and_without() -> None:
    def run(wrap: Wrap, state: Any = None) -> tuple[Any, list[float]]:
        model = wrap(make_model(plain=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = tw.LocalSGD(2, compression=tw.Sparse(0.5), outer_momentum=0.9)
        with tw.local_sgd(model, optimizer, config) as sync:
            if state is not None:
                sync.load_state_dict(state)
            for step in range(3):
                x, y = batch(step, 0)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            return sync.state_dict(), flat(model)

    state, _ = run(whole)
    expected = run(plain, run(plain)[0])[1]
    assert run(plain, state)[1] == run(whole, state)[1] == expected


def one_rank_compiles(rank: int, size: int, fields: tuple[str, ...]) -> str:
    with torch.compiler.set_stance("force_eager"):
        engine = wrapped(plain if rank else whole, *fields)
        train(engine, (), 0, 4)
        engine.flush()
        return digest(engine)


@pytest.mark.parametrize("fields", [("dgc",), ("localsgd",)])
def test_ranks_need_not_all_compile(ranks: Pool, fields: tuple[str, ...]) -> None:
    first, second = ranks.run(one_rank_compiles, fields, size=2)
    assert first == second


def test_names_stay_where_plain_ones_would_be_two_of_a_kind() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.zeros(2))

    assert plain_names(["a._orig_mod.w", "_orig_mod.b"]) == ["a.w", "b"]
    assert plain_name("state _orig_mod.a.w exp_avg") == "state a.w exp_avg"
    assert [name for name, _ in named_parameters(Own())] == [
        "weight",
        "_orig_mod.weight",
        "_orig_mod.bias",
    ]
    assert matches("_orig_mod.a.w", "a.*") and matches("a.w", "*_orig_mod.w") is False
