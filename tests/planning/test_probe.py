"""What is measured between real ranks, and the plan that follows from it."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests import api
from tests.lab.namespaces import needs_netns, result_over
from tests.launched import as_torchrun_starts, free_port
from tests.processes import ran, torchrun
from tests.ranks import Pool

RANKS = 3
MEASURED = "device='cuda' is given, but probe='.*probe.json' has measured it; omit one of them"


def probe_by_torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    return ran(torchrun("-m", "thinwire", "probe", *words, ranks=RANKS))


@pytest.fixture(scope="module")
def file(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "probe.json"
    said, *_ = ranks.run(probed, free_port(), str(path), size=RANKS)
    assert "slowest pair: rank " in said
    return path


def probed(rank: int, size: int, port: int, path: str) -> str:
    """What a rank of the command prints."""
    with as_torchrun_starts(rank, size, port) as said:
        api.command.probe(out=Path(path), size="tiny", batch=2, quiet=True)
    return said.getvalue()


@pytest.mark.fault("one slow line among fast ones")
@pytest.mark.slow
def test_every_pair_and_every_gradient_is_measured(file: Path) -> None:
    found = json.loads(file.read_text())
    both_ways = [[a, b] for a in range(RANKS) for b in range(RANKS) if a != b]
    assert sorted(pair["ranks"] for pair in found["pairs"]) == both_ways
    for pair in found["pairs"]:
        assert 0 < pair["latency_s"] < 1
        assert pair["bytes_s"] > 1e6
        assert pair["one_bytes_s"] > 1e6
        assert pair["streams"] == api.streams_between(RANKS)
    assert [each["rank"] for each in found["together"]] == [0, 1, 2]
    assert [each["kind"] for each in found["collectives"]] == ["all_reduce"]
    compute = found["compute"]
    assert 0 < compute["forward_s"] < compute["step_s"]
    assert len(compute["ready_s"]) == len(compute["shapes"])
    assert all(compute["forward_s"] < at <= compute["step_s"] for at in compute["ready_s"])
    # the output layer's gradient comes first, the embedding's last
    assert compute["ready_s"][-1] < compute["ready_s"][0]


@pytest.mark.slow
def test_a_file_that_rank_0_cannot_write_is_one_line_of_all_at_once() -> None:
    said = probe_by_torchrun("--out", "/no/such/probe.json", "--size", "tiny", "--batch", "2")
    assert said.returncode == 1  # of torchrun
    line = "thinwire: out='/no/such/probe.json' cannot be written: No such file or directory"
    assert said.stderr.count(line) >= 1
    assert "did not answer" not in said.stderr


def test_probe_stays_within_its_byte_limit(file: Path) -> None:
    assert json.loads(file.read_text())["bytes"] <= 32 * 2**20


def test_a_plan_follows_from_it(file: Path) -> None:
    found = json.loads(file.read_text())
    plan = tw.plan(probe=file)
    assert plan.link["measured"] is True
    assert plan.link["workers"] == RANKS
    slowest = min(each["bytes_s"] for each in found["together"])
    assert plan.link["rate_bit_s"] == pytest.approx(8 * slowest / api.FRAMES)
    dense = plan["dense"]
    assert dense.bytes_per_step == pytest.approx(2 * 2 / 3 * 4 * found["compute"]["parameters"])
    assert dense.step_seconds[1] >= found["compute"]["step_s"]


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({"format": 7}, {}, "format 7.*probe again"),
        ({"ranks": 1}, {}, "one rank"),
        ({}, {"workers": 8}, "workers=8.*3 ranks"),
        ({}, {"link": "1gbit"}, "link='1gbit' is given.*probe.json"),
        ({}, {"device": "cuda"}, MEASURED),
        ({"task": "mine.py:task"}, {"task": "mine.py:task", "device": "cuda"}, MEASURED),
        ({"pairs": 3}, {}, "incomplete.*probe again"),
        ({"compute": {}}, {}, "incomplete.*probe again"),
        ({"hosts": []}, {}, "incomplete.*probe again"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_line(
    file: Path, tmp_path: Path, change: dict, arguments: dict, says: str
) -> None:
    changed = tmp_path / "probe.json"
    changed.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=says):
        tw.plan(probe=changed, **arguments)


def test_a_stated_loss_fills_less_of_a_line_that_is_long(file: Path, tmp_path: Path) -> None:
    found, path, rates = json.loads(file.read_text()), tmp_path / "probe.json", []
    assert found.pop("loss") == 0  # which files of earlier versions lack
    found["together"] = [{"rank": rank, "bytes_s": 6e6} for rank in range(RANKS)]
    for pair in found["pairs"]:
        pair["latency_s"] = 0.04
    for stated in ({}, {"loss": 0.02}, {"loss": 0.2}):
        path.write_text(json.dumps(found | stated))
        rates.append(tw.plan(probe=path).link["rate_bit_s"])
    assert rates[0] == pytest.approx(48e6 / api.FRAMES)
    assert rates[0] > rates[1] > 2 * rates[2]


def on_machines(file: Path, hosts: str, inside: float, path: Path) -> Path:
    """The same probe with ranks on these machines, whose lines inside are so many times faster."""
    found = json.loads(file.read_text())
    pairs = [
        {
            "ranks": [a, b],
            "latency_s": 0.01 / (inside if hosts[a] == hosts[b] else 1),
            "bytes_s": 1e6 * (inside if hosts[a] == hosts[b] else 1),
        }
        for a in range(len(hosts))
        for b in range(a + 1, len(hosts))
    ]
    together = [{"rank": rank, "bytes_s": 1e6} for rank in range(len(hosts))]
    changed = {"ranks": len(hosts), "hosts": list(hosts), "pairs": pairs, "together": together}
    path.write_text(json.dumps({**found, **changed, "collectives": []}))
    return path


def test_ranks_of_a_machine_average_first_where_probe_saw_them(file: Path, tmp_path: Path) -> None:
    assert json.loads(file.read_text())["hosts"] == [socket.gethostname()] * RANKS
    assert tw.plan(probe=file).link["node_size"] == 1
    near = on_machines(file, "aaaabbbb", 1000, tmp_path / "near.json")
    assert tw.plan(probe=near).link["node_size"] == 4
    # a dense mean inside costs more than it saves where lines inside are as thin as those outside
    far = on_machines(file, "aaaabbbb", 1, tmp_path / "far.json")
    (by_near, alone), (by_far, still_alone) = (
        [
            api.cost_of(tw.DistributedStrategy(dgc=dgc), "", probe.work, probe.network).step_s
            for dgc in (tw.DGC(value_bits=32), tw.DGC(value_bits=32, node_size=1))
        ]
        for probe in map(api.Probe.read, (near, far))
    )
    assert by_near < alone == still_alone < by_far
    found = json.loads((tmp_path / "near.json").read_text())
    for pair in found["pairs"]:
        pair["bytes_s"] = None  # latencies took all the time
    (tmp_path / "unknown.json").write_text(json.dumps(found))
    assert tw.plan(probe=tmp_path / "unknown.json").link["node_size"] == 1
    for hosts in ("aaaaabbb", "abababab", "abcdefgh", "aaaaaaaa"):
        plan = tw.plan(probe=on_machines(file, hosts, 1000, tmp_path / "other.json"))
        assert plan.link["node_size"] == 1


def test_whether_idle_connections_begin_anew_is_looked_up(file: Path, tmp_path: Path) -> None:
    found = json.loads(file.read_text())
    assert found["idle_restarts"] == [api.idle_restarts()] * RANKS

    def restarts(**changes: Any) -> bool:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps({**found, **changes}))
        return api.Probe.read(path).network.restarts

    assert not restarts(idle_restarts=[False] * RANKS)
    assert restarts(idle_restarts=[False] * (RANKS - 1) + [True])


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing"])
def test_file_not_a_probe_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="thinwire probe"):
        tw.plan(probe=path)
    with pytest.raises(ValueError, match="cannot be read"):
        tw.plan(probe=tmp_path / "missing.json")


TASK = """
import os, torch, thinwire as tw

class Stops(torch.optim.SGD):
    def step(self, closure=None):
        if os.environ["RANK"] == "1":
            raise RuntimeError("no room")
        return super().step(closure)

def task(seed):
    torch.manual_seed(seed)
    held_out = torch.randn(8, 6)
    return tw.Task(
        model=torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)),
        loss_fn=torch.nn.functional.mse_loss,
        batches=lambda rank, world: iter(lambda: (held_out, held_out), None),
        evaluate=lambda model: torch.nn.functional.mse_loss(model(held_out), held_out),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
"""


@pytest.mark.slow
def test_a_task_of_ones_own_is_measured_and_planned_with(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    task, path = f"{tmp_path / 'mine.py'}:task", tmp_path / "probe.json"
    said = probe_by_torchrun("--out", str(path), "--task", task, "--loss", "0.2%")
    assert said.returncode == 0, said.stderr
    found = json.loads(path.read_text())
    assert found["loss"] == 0.002
    assert found["task"] == task
    assert found["compute"]["shapes"] == [[16, 6], [16], [6, 16], [6]]
    of_task, plain = tw.plan(probe=path, task=task), tw.plan(probe=path)
    assert of_task.to_dict() == plain.to_dict()
    longer = tw.plan(probe=path, task=task, step_seconds=2.0)
    assert longer["dense"].step_seconds[1] > 2.0
    assert longer.link == plain.link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("torch.manual_seed(seed)", "if os.environ['RANK'] == '1': raise OSError('no data')",
         "task(0) raised OSError: no data (on rank 1)"),
        ("torch.manual_seed(seed)", "if os.environ['RANK'] == '1': raise SystemExit(3)",
         "task(0) raised SystemExit: 3 (on rank 1)"),
        ("torch.optim.SGD(params", "Stops(params",
         "step 1 raised RuntimeError: no room (on rank 1)"),
    ],
)  # fmt: skip
def test_task_that_fails_is_one_line(tmp_path: Path, before: str, after: str, says: str) -> None:
    said, told = failing(tmp_path, TASK.replace(before, after))
    assert set(told) == {f"thinwire: task={f'{tmp_path}/mine.py:task'!r}: {says}"}
    assert "exitcode: 2" in said.stderr or "exitcode  : 2" in said.stderr
    assert "in step" not in said.stderr
    assert not (tmp_path / "p.json").exists()


def failing(folder: Path, text: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A probe of a task that fails, and the lines with which the command says so."""
    (folder / "mine.py").write_text(text)
    words = ("--out", str(folder / "p.json"), "--task", f"{folder}/mine.py:task", "--quiet")
    said = probe_by_torchrun(*words)
    assert said.returncode != 0
    return said, [line for line in said.stderr.splitlines() if line.startswith("thinwire: ")]


@pytest.mark.slow
def test_a_rank_that_leaves_is_one_line_on_the_others(tmp_path: Path) -> None:
    leaving = "if os.environ['RANK'] == '1': os._exit(5)"
    said, told = failing(tmp_path, TASK.replace("torch.manual_seed(seed)", leaving))
    assert all("another rank has left" in line for line in told)
    assert "planning/command.py" not in said.stderr


@pytest.mark.slow
@needs_netns
@pytest.mark.parametrize("loss", ["0%", "2%"])
def test_a_shaped_line_is_measured_as_it_is(loss: str, tmp_path: Path) -> None:
    link = api.Link.parse("20mbit", "10ms", loss=loss, congestion="cubic")
    result = result_over(link, "tests.planning.probing:Probing", tmp_path)
    for pair in result["pairs"]:
        assert pair["latency_s"] == pytest.approx(0.010, rel=0.3)
        assert pair["congestion"] == "cubic"
        assert 0 <= pair["lost"] < 0.1
        if loss == "2%":
            assert pair["lost"] > 0.001
            assert pair["one_bytes_s"] < 0.7 * pair["bytes_s"]
    for each in (*result["pairs"], *result["together"]):
        assert 8 * each["bytes_s"] / api.FRAMES == pytest.approx(20e6, rel=0.4)
