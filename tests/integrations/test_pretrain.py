"""The example of pretraining: text into shards, ranks that are killed, members, and the export."""

import json
import shutil
import sys
import sysconfig
from itertools import takewhile
from pathlib import Path

import pytest

from tests.integrations.packages import needs
from tests.members.places import meeting_place, token_in
from tests.processes import ran, running, torchrun

FOLDER = Path(__file__).parents[2] / "examples" / "pretrain"
pytestmark = [pytest.mark.slow, pytest.mark.integrations, needs("tokenizers")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]:
        shutil.copy(path, text)
    out = text / "data"
    done = script("data", "--text", str(text), "--out", str(out), "--vocabulary", "512")
    assert done.returncode == 0, done.stderr
    return out


def script(name: str, *words: str, **options: object):
    return ran([sys.executable, str(FOLDER / f"{name}.py"), *words], **options)


def arguments(data: Path, out: Path, **others: object) -> list[str]:
    given = {"size": "tiny", "data": data, "out": out, "steps": 32, "every": 8, "warm-up": 8}
    return [word for key, value in (given | others).items() for word in (f"--{key}", str(value))]


def log_of(out: Path) -> dict[int, dict[str, float]]:
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of two ranks that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole")
    done = ran(torchrun(str(FOLDER / "train.py"), *arguments(data, out)))
    assert done.returncode == 0, done.stderr
    return out


def test_pretraining_of_ranks_killed_and_restarted_ends_as_undisturbed(
    data: Path, trained: Path, tmp_path: Path
) -> None:
    command = torchrun(str(FOLDER / "train.py"), *arguments(data, tmp_path))
    with running(command, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert len([*takewhile(lambda line: not line.startswith("step 16"), process.stdout)]) == 1
    assert ran(command).returncode == 0
    whole, parts = log_of(trained), log_of(tmp_path)
    assert whole[32]["validation"] < whole[8]["validation"] - 0.2
    assert {step: parts[step]["validation"] for step in whole} == {
        step: line["validation"] for step, line in whole.items()
    }


def test_pretraining_of_a_joiner_ends_at_the_step_of_the_others(data: Path, tmp_path: Path) -> None:
    token = str(token_in(tmp_path))
    with meeting_place() as address:
        words = arguments(data, tmp_path, join=address, token=token, bfloat16="")
        command = [sys.executable, str(FOLDER / "train.py"), *filter(None, words)]
        with running(command, stdout=-1, text=True) as first:
            assert first.stdout is not None
            assert first.stdout.readline().startswith("step 8: ")
            assert ran(command).returncode == 0
            assert first.wait() == 0
    assert log_of(tmp_path)[32]["thinwire/step"] == 32


def test_exported_model_has_the_logits_and_the_continuation_of_the_example(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.syspath_prepend(FOLDER)
    from common import model_of

    done = script("export", *arguments(data, trained, to=tmp_path, prompt="def "))
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = (
        kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    import argparse

    import safetensors.torch

    model, _ = model_of(argparse.Namespace(data=data, size="tiny", seed=0))
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=False)
    x = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, model(x), rtol=1e-5, atol=1e-5)
    start = tokenizer("def ", return_tensors="pt")
    made = theirs.generate(**start, max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(made[0]) == done.stdout.removesuffix("\n")
