"""The example of pretraining: text into shards, ranks that are killed, members, and the export."""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.integrations.packages import needs
from tests.members.places import meeting_place, token_in
from tests.processes import ran, running, torchrun

FOLDER = Path(__file__).parents[2] / "examples" / "pretrain"
pytestmark = [pytest.mark.slow, pytest.mark.integrations, needs("tokenizers")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
        shutil.copy(path, text)
    out = text / "data"
    done = script("data", "--text", str(text), "--out", str(out), "--vocabulary", "512")
    assert done.returncode == 0, done.stderr
    return out


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, str(FOLDER / f"{name}.py"), *words])


def arguments(data: Path, out: Path, **others: object) -> list[str]:
    given = {"size": "tiny", "data": data, "out": out, "steps": 24, "every": 8, "warm-up": 8}
    return [word for key, value in (given | others).items() for word in (f"--{key}", str(value))]


member = partial(running, stdout=-1, text=True)


def until(process: subprocess.Popen[str], words: str) -> None:
    """Wait for a line with these words."""
    assert process.stdout is not None
    assert any(words in line for line in process.stdout)


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


def test_killed_pretraining_ends_as_undisturbed(data: Path, trained: Path, tmp_path: Path) -> None:
    command = torchrun(str(FOLDER / "train.py"), *arguments(data, tmp_path))
    with running(command, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 1: loss ")
        until(process, "step 8: ")
    assert ran(command).returncode == 0
    whole, parts = log_of(trained), log_of(tmp_path)
    assert whole[24]["validation"] < whole[8]["validation"] - 0.1
    assert [parts[at]["validation"] for at in whole] == [at["validation"] for at in whole.values()]


def test_pretraining_continues_as_one_joins_and_another_leaves(data: Path, tmp_path: Path) -> None:
    words = ["--bfloat16", *arguments(data, tmp_path, steps=10_000, token=token_in(tmp_path))]
    with meeting_place() as address:
        command = [sys.executable, str(FOLDER / "train.py"), "--join", address, *words]
        with member(command) as first:
            until(first, "validation")
            with member(command) as second:
                until(first, "2 members")
                first.terminate()
                until(second, "1 members")
                until(second, "validation")
                second.terminate()
                assert [first.wait(), second.wait()] == [0, 0]


def test_exported_model_has_the_logits_and_the_continuation_of_the_example(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from common import model_of
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = script("export", *arguments(data, trained, to=tmp_path, prompt="def "))
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = (
        kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    model, _ = model_of(argparse.Namespace(data=data, size="tiny", seed=0))
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=False)
    x = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, model(x), rtol=1e-5, atol=1e-5)
    start = tokenizer("def ", return_tensors="pt")
    made = theirs.generate(**start, max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(made[0]) == done.stdout.removesuffix("\n")
