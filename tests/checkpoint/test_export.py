"""A checkpoint of any number of ranks as one file that torch and safetensors read by themselves."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import thinwire as tw
from tests.checkpoint.states import flip, same
from tests.ranks import Pool
from tests.strategy.training import make_engine, train
from tests.toys import answer, engine_of, refusal
from thinwire.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)


class Tied(nn.Module):
    """Embedding and head share their weight; one buffer is kept, another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(x)))
        return logits


class WithMore(nn.Linear):
    """A module whose `state_dict` has something that is no tensor of it."""

    def get_extra_state(self) -> Any:
        return {"since": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


def saved(root: Path, model: nn.Module, steps: int = 1) -> Any:
    engine = engine_of(model, nn.functional.cross_entropy)
    for step in range(steps):
        engine.train_step(torch.arange(12).roll(step), torch.arange(12))
        engine.save(root, keep=None)
    return engine


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def test_the_file_has_the_names_and_the_bits_of_the_state_dict(tmp_path: Path) -> None:
    engine = saved(tmp_path / "run", Tied())
    made = tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert same(dict(sorted(state.items())), dict(sorted(whole(engine.model).items())))
    fresh = Tied()
    fresh.load_state_dict(state)  # strictly
    assert fresh.head.weight is fresh.embed.weight
    assert (made.tied, made.averaged, made.left_out) == ({"head.weight": "embed.weight"}, (), ())
    with safe_open(made.file, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tied"]) == made.tied
    assert (metadata["format"], metadata["thinwire_step"]) == ("pt", "1")
    assert made.size_bytes == made.file.stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


@pytest.mark.parametrize("name", ["localsgd", "pipeline", "dgc"])
def test_state_of_two_ranks_is_that_for_any_number(ranks: Pool, tmp_path: Path, name: str) -> None:
    models = ranks.run(_trained_and_saved, name, str(tmp_path / "run"))
    made = tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    state = load_file(made.file)
    assert (made.ranks, made.step) == (2, 2)
    if name == "pipeline":
        assert same(state, {**models[0], **models[1]})
        assert not models[0].keys() & models[1].keys()
        return
    assert state.keys() == models[0].keys()
    assert (len(made.averaged) > 0) == (name == "localsgd")  # in the middle of an interval
    for key, value in state.items():
        if value.is_floating_point():
            mean = (models[0][key].double() + models[1][key].double()) / 2
            assert torch.equal(value, mean.to(value.dtype)), key


def _trained_and_saved(rank: int, size: int, name: str, root: str) -> dict[str, Tensor]:
    engine = make_engine([name], plain=name == "pipeline")
    train(engine, [name], 0, 2)
    engine.save(root)
    return whole(engine.model)


def test_the_newest_of_several_or_the_one_that_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "run", Tied(), steps=3)
    for folder, step in (("run", 3), ("run/step_0000000002", 2)):
        made = tw.checkpoint.export(tmp_path / folder, tmp_path / f"{step}.safetensors")
        assert (made.step, made.checkpoint.name) == (step, f"step_000000000{step}")
    elsewhere = (tmp_path / "run" / "step_0000000001").rename(tmp_path / "best")
    assert tw.checkpoint.export(elsewhere, tmp_path / "best.safetensors").step == 1


def test_a_damaged_one_is_passed_over_aloud_and_refused_by_its_name(tmp_path: Path) -> None:
    saved(tmp_path / "run", Tied(), steps=2)
    newest = tmp_path / "run" / "step_0000000002"
    flip(newest / "rank_00000.safetensors")
    with pytest.warns(UserWarning, match=r"step_0000000002.*is damaged"):
        made = tw.checkpoint.export(tmp_path / "run", tmp_path / "a.safetensors")
    assert made.step == 1
    with pytest.raises(CheckpointCorrupt, match=r"step_0000000002.*is damaged"):
        tw.checkpoint.export(newest, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_file_that_is_there_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "run", Tied())
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        tw.checkpoint.export(tmp_path / "run", file)
    assert file.read_text() == "mine"
    tw.checkpoint.export(tmp_path / "run", file, force=True)
    assert load_file(file).keys() == Tied().state_dict().keys()


def test_value_not_a_tensor_is_named_and_left_out(tmp_path: Path) -> None:
    saved(tmp_path / "run", nn.Sequential(nn.Embedding(12, 4), WithMore(4, 12)))
    made = tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    assert made.left_out == ("1._extra_state",)
    assert load_file(made.file).keys() == {"0.weight", "1.weight", "1.bias"}


def test_tensors_safetensors_cannot_read_everywhere_are_refused(tmp_path: Path) -> None:
    model = nn.Embedding(12, 12)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    saved(tmp_path / "run", model)
    with pytest.raises(CheckpointError, match=r"phase is torch\.complex64"):
        tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")


def test_file_not_saved_by_an_engine_is_refused(tmp_path: Path) -> None:
    from tests.api import Group, save

    save(tmp_path / "run", {"weight": torch.ones(2)}, step=1, group=Group(), facts={})
    with pytest.raises(CheckpointError, match="its state has no parameters"):
        tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMissing, match="there is no checkpoint in"):
        tw.checkpoint.export(tmp_path, tmp_path / "model.safetensors")


def test_command_names_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run", Tied(), steps=2)
    words = ("export", str(tmp_path / "run"), str(tmp_path / "model.safetensors"))
    first, second = answer(capsys, *words)[0].splitlines()
    assert "step_0000000002 (step 2, saved by 1 rank): 7 tensors" in first
    assert second == "tied, written under both names: head.weight is embed.weight"
    assert answer(capsys, *words, "--force", "--quiet") == ("", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", "a.safetensors"], "there is no folder nowhere"),
        (["run", "a.pt"], "must end in .safetensors"),
        (["run", "no/a.safetensors"], "there is no folder no"),
        (["run", "there.safetensors"], "--force"),
        (["empty", "a.safetensors"], "there is no checkpoint in empty"),
        (["damaged", "a.safetensors"], "no checkpoint is intact"),
        (["run"], "file"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run", Tied())
    saved(tmp_path / "damaged", Tied())
    flip(tmp_path / "damaged" / "step_0000000001" / "rank_00000.json")
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.safetensors").touch()
    assert told.lower() in refusal(capsys, "export", *arguments).lower()
    assert not (tmp_path / "a.safetensors").exists()


save_folder = partial(torch.distributed.checkpoint.save, no_dist=True)
FILES: dict[str, Callable[..., Any]] = {
    "safetensors": save_file,
    "pt": torch.save,
    "folder": lambda state, path: save_folder(state, checkpoint_id=path),
}


# torch warns of its own code
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", FILES)
def test_a_tied_tensor_is_taken_under_any_of_its_names(tmp_path: Path, kind: str) -> None:
    state, engine = whole(source := Tied()), saved(tmp_path / "run", Tied(), steps=0)
    for lacking in ("embed.weight", "head.weight", None, "a file of save_model"):
        file = tmp_path / f"{lacking}.{kind}"
        FILES[kind]({k: v.clone() for k, v in state.items() if k != lacking}, file)
        if (kind, lacking) == ("safetensors", "a file of save_model"):
            save_model(source, file)
        nn.init.zeros_(engine.model.embed.weight)
        engine.load_parameters(file, torch_checkpoint=True)
        assert same(whole(engine.model), state)
    FILES[kind]({k: v + (k == "head.weight") for k, v in state.items()}, tmp_path / f"new.{kind}")
    with pytest.raises(CheckpointMismatch, match=r"embed\.weight and head\.weight .* differ"):
        engine.load_parameters(tmp_path / f"new.{kind}", torch_checkpoint=True)
    assert same(whole(engine.model), state)


def test_a_checkpoint_without_frozen_parameters_is_refused_by_their_names(tmp_path: Path) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    saved(tmp_path / "run", model, steps=0).save(tmp_path / "run", frozen=False)
    with pytest.raises(CheckpointError, match=r"frozen=False.*norm\.weight, norm\.bias"):
        tw.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
