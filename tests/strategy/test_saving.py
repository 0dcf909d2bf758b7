"""What an engine saves beside its state, and what it finds and refuses on loading."""

import logging
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

import thinwire as tw
from tests.checkpoint.states import same
from tests.ranks import Pool
from tests.strategy.training import FIELDS, batch, digest, make_engine, make_model, prepared, train
from thinwire.errors import CheckpointError, CheckpointMismatch, CheckpointMissing


def test_nothing_there_yet_may_be_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = prepared()
    before = digest(engine)
    with caplog.at_level(logging.INFO, "thinwire"):
        assert engine.load(tmp_path / "run", if_any=True) is None
    assert "starts from the beginning" in caplog.text
    assert (digest(engine), engine.extra) == (before, None)
    with pytest.raises(CheckpointMissing, match=r"there is no checkpoint in .*run"):
        engine.load(tmp_path / "run")
    path = engine.save(tmp_path / "run")
    assert engine.load(tmp_path / "run", if_any=True) == path


def test_existing_checkpoint_is_not_missing_because_an_argument_is_wrong(tmp_path: Path) -> None:
    engine = prepared()
    path = engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="is a single checkpoint: pass the directory"):
        engine.load(path, if_any=True)
    with pytest.raises(TypeError, match="if_any must be True or False, got 'no'"):
        engine.load(tmp_path, if_any="no")  # type: ignore[arg-type]
    with pytest.raises(CheckpointMissing, match=r"there is no file .*model\.safetensors"):
        engine.load_parameters(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="keep must be an integer >= 1, got 0"):
        engine.save(tmp_path, keep=0)
    (path / "rank_00000.json").write_text("?")
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        engine.load(tmp_path, if_any=True)


class Sampler:
    """Something of the user's with a state."""

    def __init__(self) -> None:
        self.seen, self.order = 0, torch.arange(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "order": self.order, "nested": OrderedDict(a=[1, (2.5, None)])}


def test_user_values_come_back(tmp_path: Path) -> None:
    engine = prepared()
    sampler = Sampler()
    sampler.seen = 7
    ema = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    given = {
        "epoch": 3,
        "best": 1.5,
        "names": ["a", ("b", None, True)],
        "average": torch.arange(4, dtype=torch.bfloat16),
        "sampler": sampler,
        "ema": ema,
        "scaler": scaler,
        3: {"deep": [Sampler()]},
    }
    engine.save(tmp_path, extra=given)
    again = prepared()
    again.load(tmp_path)
    found = again.extra
    assert same(
        found["sampler"], {"seen": 7, "order": torch.arange(3), "nested": {"a": [1, (2.5, None)]}}
    )
    assert found[3]["deep"][0]["seen"] == 0
    for key in ("epoch", "best", "names", "average"):
        assert same(found[key], given[key])
    ema.load_state_dict(found["ema"])
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(found["scaler"])
    assert other.get_scale() == 8.0
    engine.save(tmp_path)
    again.load(tmp_path)
    assert again.extra is None


@pytest.mark.parametrize(
    ("extra", "needle"),
    [
        ({"f": [print]}, r"extra\['f'\]\[0\] is of type builtin_function_or_method"),
        ({"g": torch.Generator()}, r"extra\['g'\] is of type Generator.*get_state\(\)"),
        (
            {"a": np.arange(3)},
            r"extra\['a'\] is of type ndarray.*: pass torch\.from_numpy\(array\)",
        ),
        ([np.timedelta64(1, "s")], r"extra\[0\] is of type timedelta64"),
        ({(1, 2): 3}, "has the key"),
        (object(), "extra is of type object"),
    ],
)
def test_value_that_cannot_be_saved_is_refused(tmp_path: Path, extra: Any, needle: str) -> None:
    with pytest.raises(CheckpointError, match=needle):
        prepared().save(tmp_path, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_return_as_python_numbers(tmp_path: Path) -> None:
    given: list[Any] = [np.bool_(True), np.uint8(255), np.int64(-(2**62)), np.float64(0.1)]
    given += [np.float16(1.5), np.float32(0.1), np.float32("inf")]
    engine = prepared()
    engine.save(tmp_path, extra={"best": given, "deep": {1: (np.float32(0.1),)}})
    engine.load(tmp_path)
    assert engine.extra["best"] == given
    assert [type(each) for each in engine.extra["best"]] == [bool, int, int, *[float] * 4]
    assert engine.extra["deep"] == {1: (float(np.float32(0.1)),)}


def extra_of_each(rank: int, size: int, folder: str, saves: bool) -> Any:
    engine = prepared()
    if saves:
        engine.save(folder, extra={"rank": rank, "order": [rank] * (rank + 1), "loss": float(rank)})
    engine.load(folder)
    return engine.extra


def test_every_rank_gets_its_own_and_other_numbers_of_ranks_that_of_rank_0(
    ranks: Pool, tmp_path: Path
) -> None:
    answers = ranks.run(extra_of_each, str(tmp_path), True, size=2)
    assert answers == [{"rank": r, "order": [r] * (r + 1), "loss": float(r)} for r in range(2)]
    assert ranks.run(extra_of_each, str(tmp_path), False, size=3) == [answers[0]] * 3


def broken_extra(rank: int, size: int, folder: str) -> None:
    make_engine((), plain=True).save(folder, extra={"x": print} if rank == 1 else None)


def test_state_one_rank_cannot_save_is_an_error_on_all(ranks: Pool, tmp_path: Path) -> None:
    ranks.raise_alike(
        "CheckpointError", ["rank 1: ", "extra['x']"], broken_extra, str(tmp_path), size=2
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch_schedulers.LambdaLR(o, lambda n: 0.5**n),
    "multiplicative": lambda o: torch_schedulers.MultiplicativeLR(o, lambda n: 0.9),
    "step": lambda o: torch_schedulers.StepLR(o, 2, 0.5),
    "multi-step": lambda o: torch_schedulers.MultiStepLR(o, [1, 3, 3, 4], 0.5),
    "constant": lambda o: torch_schedulers.ConstantLR(o, 0.5, 3),
    "linear": lambda o: torch_schedulers.LinearLR(o, 0.5, 1.0, 8),
    "exponential": lambda o: torch_schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: torch_schedulers.PolynomialLR(o, 9, 2.0),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, 9),
    "restarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: torch_schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "one cycle": lambda o: torch_schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "sequential": lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.ConstantLR(o, 0.1, 3), torch_schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: torch_schedulers.ChainedScheduler(
        [torch_schedulers.ConstantLR(o, 0.1, 3), torch_schedulers.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: torch_schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "ours": lambda o: tw.schedules.ScheduledLR(o, tw.schedules.CosineDecay(0.0, 0.1, 9)),
}


def rates(engine: Any, scheduler: Any, first: int, last: int) -> list[float]:
    used = []
    for step in range(first, last):
        used.append(float(engine.optimizer.param_groups[0]["lr"]))
        engine.train_step(*batch(step, 0))
        if isinstance(scheduler, torch_schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return used


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    straight = prepared()
    scheduler = SCHEDULERS[kind](straight.optimizer)
    rates(straight, scheduler, 0, 3)
    straight.save(tmp_path)
    expected = rates(straight, scheduler, 3, 8)
    assert len(set(expected)) > 1 or kind == "constant"

    resumed = prepared()
    again = SCHEDULERS[kind](resumed.optimizer)
    resumed.load(tmp_path)
    assert rates(resumed, again, 3, 8) == expected
    assert digest(resumed) == digest(straight)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_two_of_a_kind_are_distinguished_by_their_settings(tmp_path: Path) -> None:
    def both(optimizer: Any, order: int) -> list[Any]:
        settings = [(2, 0.5), (3, 0.1)]
        return [torch_schedulers.StepLR(optimizer, *each) for each in settings[::order]][::order]

    straight = prepared()
    pair = both(straight.optimizer, 1)
    for scheduler, count in zip(pair, (4, 1), strict=True):
        for _ in range(count):
            scheduler.step()
    straight.save(tmp_path)
    resumed = prepared()
    found = both(resumed.optimizer, -1)
    resumed.load(tmp_path)
    assert [s.last_epoch for s in found] == [4, 1]


def test_scheduler_that_is_missing_or_new_is_reported(tmp_path: Path) -> None:
    engine = prepared()
    scheduler = SCHEDULERS["step"](engine.optimizer)
    engine.save(tmp_path / "with")
    del scheduler
    with pytest.warns(UserWarning, match=r"StepLR.*this engine has none.*before engine\.load"):
        engine.load(tmp_path / "with")
    engine.save(tmp_path / "without")
    scheduler = SCHEDULERS["cosine"](engine.optimizer)
    with pytest.warns(UserWarning, match=r"CosineAnnealingLR.*the state has none"):
        engine.load(tmp_path / "without")
    assert scheduler.last_epoch == 0


def test_whoever_keeps_a_scheduler_in_extra_restores_it_alone(tmp_path: Path) -> None:
    engine = prepared()
    scheduler = SCHEDULERS["step"](engine.optimizer)
    rates(engine, scheduler, 0, 3)
    engine.save(tmp_path, extra={"scheduler": scheduler})
    resumed = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load(tmp_path)
    again = SCHEDULERS["step"](resumed.optimizer)
    again.load_state_dict(resumed.extra["scheduler"])
    assert again.last_epoch == 3


class Odd(torch_schedulers.StepLR):
    """Of somebody who keeps what no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "file": print}


def test_a_scheduler_that_cannot_be_saved_is_refused_aloud(tmp_path: Path) -> None:
    engine = prepared()
    kept = Odd(engine.optimizer, 2)
    with pytest.raises(CheckpointError, match=r"Odd.*cannot be saved.*file.*builtin_function"):
        engine.save(tmp_path)
    assert kept.last_epoch == 0


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k_steps": (
        {"gradient_merge": tw.GradientMerge(2)},
        {"gradient_merge": tw.GradientMerge(3, avg=False)},
    ),
    "merge on": ({}, {"gradient_merge": tw.GradientMerge(3)}),
    "sparsity": (
        {"dgc": tw.DGC(1, sparsity=(0.75,), min_numel=64)},
        {"dgc": tw.DGC(4, 3, (0.5, 0.9), min_numel=64, value_bits=4, local_grad_clip_norm=3.0)},
    ),
    "k_steps of local updates": (
        {"localsgd": tw.LocalSGD(2, compression=tw.Sparse(0.5))},
        {"localsgd": tw.LocalSGD(5, 2, outer_lr=0.5, compression=tw.Sparse(0.9, value_bits=4))},
    ),
    "kind of compression": (
        {"localsgd": tw.LocalSGD(2, compression=tw.Sparse(0.5, mean_over="all"))},
        {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(2))},
    ),
    "bits of a compression": (
        {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(2))},
        {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(8, decay=0.5))},
    ),
    "recompute": ({}, {"recompute": tw.Recompute(("1",))}),
    "loss scale": (
        {"amp": tw.AMP("bfloat16", tw.DynamicLossScale(64.0))},
        {"amp": tw.AMP("bfloat16", tw.DynamicLossScale(128.0, scale_window=7))},
    ),
    "lars": ({"lars": tw.LARS(0.02)}, {"lars": tw.LARS(0.05, 1e-3)}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_settings_that_touch_no_state_may_change(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = CHANGES[case]
    engine = prepared(**before)
    train(engine, (), 0, 4)
    engine.save(tmp_path)
    engine.close()
    changed = prepared(**after)
    fresh = [dict(group) for group in changed.optimizer.param_groups]
    changed.load(tmp_path)
    assert digest(changed) == digest(engine)
    assert "is loaded with changed settings" in caplog.text
    assert case != "sparsity" or "dgc.sparsity was [0.75] and is [0.5, 0.9]" in caplog.text
    ramp = ("sparsity", "rampup_begin_step", "rampup_step")
    for key in (*ramp, "local_grad_clip_norm", "trust_coefficient"):  # new settings are in force
        assert changed.optimizer.param_groups[0].get(key) == fresh[0].get(key)
    if case == "k_steps of local updates":
        assert changed.stats()["k_steps"] == 5
    train(changed, (), 4, 8)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "min_numel": (
        {"dgc": tw.DGC(1, sparsity=(0.75,), min_numel=64)},
        {"dgc": tw.DGC(1, sparsity=(0.75,), min_numel=100)},
        r"strategy\.dgc\.min_numel was 64 when it was saved and is 100 in this engine",
    ),
    "compression": (
        {"localsgd": tw.LocalSGD(2)},
        {"localsgd": tw.LocalSGD(2, compression=tw.Sparse(0.9))},
        r"strategy\.localsgd\.compression was nothing when",
    ),
    "outer momentum": (
        {"localsgd": tw.LocalSGD(2)},
        {"localsgd": tw.LocalSGD(2, outer_momentum=0.5)},
        r"strategy\.localsgd\.outer_momentum was 0\.0 when",
    ),
    "dgc off": (
        {"dgc": tw.DGC(1, min_numel=64)},
        {},
        r"strategy\.dgc was .* and is nothing in this engine",
    ),
}


@pytest.mark.fault("another method, or a newer format")
@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_touch_state_are_named_with_both_values(tmp_path: Path, case: str) -> None:
    before, after, needle = REFUSED[case]
    engine = prepared(**before)
    train(engine, (), 0, 3)
    engine.save(tmp_path)
    engine.close()
    other = prepared(**after)
    with pytest.raises(CheckpointMismatch, match=needle) as caught:
        other.load(tmp_path, if_any=True)
    assert "engine.load_parameters" in str(caught.value)
    assert other.load_parameters(tmp_path).name == "step_0000000003"
    assert digest(other) == digest(engine)
    assert other.step == 0
    train(other, (), 3, 6)


def test_a_checkpoint_of_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    prepared().save(tmp_path)
    adam = prepared(optimizer=lambda net: torch.optim.Adam(net.parameters()))
    for other, what in (
        (adam, "optimizer was"),
        (prepared(make_model(plain=True, blocks=3)), "parameters"),
    ):
        with pytest.raises(CheckpointMismatch, match=f"does not fit this engine: {what}"):
            other.load(tmp_path)


def test_a_merge_that_is_not_finished_ends_without_its_field_too(tmp_path: Path) -> None:
    engine, other = prepared(gradient_merge=tw.GradientMerge(2)), prepared()
    train(engine, (), 0, 3)
    engine.save(tmp_path)
    other.load(tmp_path)
    for each in (engine, other):
        train(each, (), 3, 4)
    assert digest(engine) == digest(other)


def diverging(rank: int, size: int, folder: str, fields: tuple[str, ...]) -> str:
    engine = make_engine(fields, plain=True)
    train(engine, fields, 0, 3)
    engine.save(folder)
    other = make_engine((), plain=True)
    other.load_parameters(folder)
    train(other, (), 3, 6)
    other.close()
    return digest(other)


@pytest.mark.parametrize("fields", [("localsgd",), ("dgc",), ("lamb",)])
def test_parameters_alone_are_equal(ranks: Pool, tmp_path: Path, fields: tuple[str, ...]) -> None:
    """Ranks that were between two averagings had different ones: their mean is taken."""
    first, second = ranks.run(diverging, str(tmp_path), fields, size=2)
    assert first == second


def onto_local(rank: int, size: int, folder: str) -> tuple[str, float]:
    made = make_engine((), plain=True)
    train(made, (), 0, 30)
    made.save(folder)
    made.close()
    config = tw.LocalSGD(4, 0, outer_lr=0.5, outer_momentum=0.5)
    other = make_engine(("localsgd",), replace={"localsgd": config}, plain=True)
    other.load_parameters(folder)
    before = [p.detach().clone() for p in other.model.parameters()]
    train(other, (), 30, 34)
    pairs = zip(other.model.parameters(), before, strict=True)
    moved = max(float((p.detach() - b).abs().max()) for p, b in pairs)
    other.close()
    return digest(other), moved


def test_parameters_alone_begin_local_updates_anew(ranks: Pool, tmp_path: Path) -> None:
    """The next averaging is measured from them, and not from the model as it was made."""
    (first, moved), (second, _) = ranks.run(onto_local, str(tmp_path), size=2)
    assert first == second
    assert moved < 0.2


def test_parameters_alone_are_for_an_engine_that_has_not_trained(tmp_path: Path) -> None:
    engine = prepared()
    engine.save(tmp_path)
    train(engine, (), 0, 1)
    with pytest.raises(RuntimeError, match="has made 1 update"):
        engine.load_parameters(tmp_path)


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("allowed", [False, True])
def test_nothing_is_unpickled_where_an_engine_saves(tmp_path: Path, allowed: bool) -> None:
    engine = prepared()
    folder, proof = engine.save(tmp_path), tmp_path / "proof"
    for place in (tmp_path, folder):
        (place / ".metadata").write_bytes(pickle.dumps(Planted(proof)))
    torch.save(engine.model.state_dict(), tmp_path / "model.pt")
    other = prepared()
    if allowed:
        for source in (tmp_path, folder, tmp_path / "model.pt"):
            with pytest.raises(CheckpointError, match="checkpoints of engine"):
                other.load_parameters(source, torch_checkpoint=True)
    else:
        assert other.load_parameters(tmp_path) == folder
        assert digest(other) == digest(engine)
    assert not proof.exists()


# torch warns of its own code before 2.13
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_torch_checkpoint_is_read_only_on_request(tmp_path: Path, kind: str) -> None:
    engine, other = prepared(), prepared()
    train(engine, (), 0, 1)
    source, state = tmp_path / kind, {"model": engine.model.state_dict(), "epoch": 3}
    if kind == "file":
        torch.save(state, source)
    else:
        with pytest.warns(UserWarning, match="single process"):
            torch.distributed.checkpoint.save(state, checkpoint_id=source, no_dist=True)
    before = digest(other)
    for load in (other.load_parameters, other.load, lambda s: other.load(s, if_any=True)):
        with pytest.raises(
            CheckpointError, match=r"load_parameters\(source, torch_checkpoint=True"
        ):
            load(source)
    assert digest(other) == before != digest(engine)
    assert other.load_parameters(source, torch_checkpoint=True) == source
    assert digest(other) == digest(engine)


def test_a_pickled_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"0.weight": Planted(tmp_path / "proof")}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be read"):
        prepared().load_parameters(tmp_path / "model.pt", torch_checkpoint=True)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder/.metadata"])
def test_a_pipe_is_no_file_of_a_model(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    source = pipe.parent if "/" in name else pipe
    with pytest.raises(CheckpointMissing, match="or it is a pipe or a device"):
        prepared().load_parameters(source, torch_checkpoint=True)


def groups_of(model: nn.Module, sizes: tuple[int, ...]) -> Any:
    params = list(model.named_parameters())
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)] + [len(params)]
    groups = [{"params": params[a:b], "lr": 0.1 + i} for i, (a, b) in enumerate(pairwise(cuts))]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("sizes", [((2,), (3,)), ((2, 2), (2,)), ((1,), ())])
def test_other_groups_are_an_error_before_anything_changes(tmp_path: Path, sizes: Any) -> None:
    engine = prepared(optimizer=lambda net: groups_of(net, sizes[0]))
    train(engine, (), 0, 3)
    engine.save(tmp_path, extra=1)
    other = prepared(optimizer=lambda net: groups_of(net, sizes[1]))
    train(other, (), 5, 7)
    before, state = digest(other), other.state_dict()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(CheckpointMismatch, match=r"does not fit this engine: .*group"):
        other.load(tmp_path)
    assert torch.equal(torch.rand(2), expected), "random numbers were touched"
    assert (digest(other), other.step, other.extra) == (before, 2, None)
    after = other.state_dict()
    assert same(after["optimizer"], state["optimizer"])


def refused_on_one(rank: int, size: int, folder: str) -> tuple[str, bool, list[float]]:
    engine = make_engine((), plain=True)
    train(engine, (), 0, 3)
    engine.save(folder)
    other = make_engine((), plain=True)
    train(other, (), 5, 7)
    scheduler = SCHEDULERS["step"](other.optimizer)
    before, state = digest(other), other.state_dict()
    if rank == 1:
        other.optimizer.register_load_state_dict_post_hook(
            lambda _: (_ for _ in ()).throw(OSError("not here"))
        )
    try:
        other.load(folder)
    except CheckpointError as error:
        text = str(error)
    assert (other.step, scheduler.last_epoch) == (2, 0)
    unchanged = digest(other) == before
    unchanged &= same(other.state_dict()["optimizer"], state["optimizer"])
    return text, unchanged, train(other, (), 0, 2)


def test_state_one_rank_refuses_is_loaded_on_none(ranks: Pool, tmp_path: Path) -> None:
    for text, unchanged, losses in ranks.run(refused_on_one, str(tmp_path), size=2):
        assert "rank 1: " in text and "not here" in text
        assert unchanged
        assert len(losses) == 2


def shuffled(
    model: nn.Module, order: int, *, named: bool, kind: Callable[..., Any], **settings: Any
) -> Any:
    params = list(model.named_parameters())[::order]
    return kind(params if named else [p for _, p in params], lr=0.05, **settings)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "torch's SGD": (torch.optim.SGD, {"momentum": 0.9}, {}),
    "torch's AdamW": (torch.optim.AdamW, {}, {}),
    "our AdamW": (tw.optim.AdamW, {}, {}),
    "DGC": (torch.optim.SGD, {"momentum": 0.9}, {"dgc": FIELDS["dgc"]}),
    "LAMB with DGC": (torch.optim.AdamW, {}, {"dgc": FIELDS["dgc"], "lamb": FIELDS["lamb"]}),
}


def by_name(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    names = {p: name for name, p in engine.model.named_parameters()}
    return {names[p]: dict(entries) for p, entries in engine.optimizer.state.items()}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_the_optimizer_does_not_matter(tmp_path: Path, kind: str, named: bool) -> None:
    make, settings, fields = KINDS[kind]
    if not named and fields:
        fields = {"dgc": fields["dgc"]}
    own = partial(shuffled, named=named, kind=make, **settings)
    first = prepared(optimizer=lambda net: own(net, 1), **fields)
    train(first, (), 0, 4)
    first.save(tmp_path)
    other = prepared(optimizer=lambda net: own(net, -1), **fields)
    other.load(tmp_path)
    found, expected = by_name(other), by_name(first)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)


def test_a_group_of_other_parameters_is_an_error_that_names_one(tmp_path: Path) -> None:
    engine = prepared(optimizer=lambda net: groups_of(net, (2,)))
    train(engine, (), 0, 2)
    engine.save(tmp_path)

    def other_groups(net: nn.Module) -> Any:
        params = list(net.named_parameters())[::-1]
        n = len(params)
        groups = [{"params": params[: n - 2]}, {"params": params[n - 2 :]}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    same_groups = prepared(optimizer=other_groups)
    same_groups.load(tmp_path)
    assert [len(group["params"]) for group in same_groups.optimizer.param_groups] == [6, 2]
    assert [group["lr"] for group in same_groups.optimizer.param_groups] == [1.1, 0.1]
    another = prepared(optimizer=lambda net: groups_of(net, (3,)))
    with pytest.raises(CheckpointMismatch, match=r"group.*1\.0\.weight"):
        another.load(tmp_path)
