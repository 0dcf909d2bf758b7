"""A whole job at 124 M parameters over 50 Mbit/s and 20 ms: start, three rounds, a kill, a resume,
and an evaluation by a script without thinwire.

    python -m research.large.job --out research/large/job.json

Needs root, for two network namespaces with a link between them, and 12 GB of memory; takes some
fifteen minutes on two cores. Rank 1 is killed by a signal in the fourth round, after a checkpoint
of the third. `--quick` is small and on the machine's own loopback.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.common import alive, parser_for, save, sent_bytes, surroundings
from research.gpt import GPT, batch, loss_of, text
from thinwire.tools.network.netns import Link, Network, network, why_unavailable
from thinwire.tools.run.config import Job
from thinwire.tools.run.launch import Events, WorkerError, run_workers

WORKERS, ROUNDS, INTERVAL = 2, 3, 2
EVALUATION = """
import sys
import torch
from safetensors.torch import load_file
from research.gpt import GPT, batch, loss_of, text
size, file, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = GPT(size).bfloat16()
model.load_state_dict(load_file(file))
with torch.no_grad():
    inputs, targets = batch(text(), seed, 4, 32)
    print(float(loss_of(model(inputs), targets)))
assert "thinwire" not in sys.modules
"""


class Run:
    """One launch of the job."""

    def __init__(self, config: dict[str, Any], events: Events) -> None:
        self.config, self.events, self.rows = config, events, []  # type: ignore[var-annotated]

    def train(self) -> dict[str, Any]:
        """Train from the newest checkpoint; the first launch ends by a signal."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        rank, data, folder = dist.get_rank(), text(), self.config["folder"]
        with alive(self.events):
            with self._timed("start"):
                model = GPT(self.config["size"]).bfloat16()
                optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=0.01)
                local = tw.LocalSGD(INTERVAL, compression=tw.Quantized(1))
                engine = tw.DistributedStrategy(localsgd=local).prepare(model, optimizer, loss_of)
                assert engine.sync is not None
            with self._timed("load"):
                found = engine.load(folder, if_any=True)
            for step in range(engine.step, (ROUNDS + 1) * INTERVAL):
                if found is not None and step == ROUNDS * INTERVAL + 1:
                    with self._timed("call of a save beside the next step"):
                        engine.save(f"{folder}-beside", wait=False)
                with self._timed("step") as row:
                    engine.train_step(*batch(data, 10 * step + rank, 1, 32))
                    row["what"] += " and averaging" * engine.sync.synced
                if engine.step == ROUNDS * INTERVAL and found is None:
                    with self._timed("save"):
                        engine.save(folder)
                if engine.step > ROUNDS * INTERVAL and found is None and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            with self._timed("rest of that save"):
                engine.wait_for_save()
            engine.flush()
            with self._timed("save of the model alone"):
                engine.save(f"{folder}-model", only="model")
            stats = engine.stats()
        return {"rows": self.rows, "stats": stats}

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[dict[str, Any]]:
        sent, begin, cpu = sent_bytes(), time.perf_counter(), time.process_time()
        row: dict[str, Any] = {"what": what}
        yield row
        row |= {
            "seconds": round(time.perf_counter() - begin, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "megabytes": round((sent_bytes() - sent) / 1e6, 2),
        }
        self.rows.append(row)
        self.events.write("said", row=row)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--link", default="50mbit", help="rate of the emulated link")
    parser.add_argument("--latency", default="20ms", help="one-way delay of the emulated link")
    parser.add_argument("--size", default="124M", help="34M, 124M or 350M")
    arguments = parser.parse_args()
    size = "tiny" if arguments.quick else arguments.size
    link = (
        Link.parse("loopback") if arguments.quick else Link.parse(arguments.link, arguments.latency)
    )
    if link.emulated and (reason := why_unavailable()) is not None:
        sys.exit(f"network namespaces {reason}; --quick runs on loopback")
    around = surroundings(1)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        emulated = stack.enter_context(network(WORKERS, link)) if link.emulated else None
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = Job(
            task="research.large.job:Run",
            config={"size": size, "folder": str(work / "c")},
            timeout_s=120.0,
        )
        killed = launch(job, emulated, work / "first", rows)
        assert "was killed by" in str(killed["error"]), killed
        print(f"as it should, the first launch ended: {killed['error']}", flush=True)
        rows.append({"what": "kill", "error": str(killed["error"])})
        ended = launch(job, emulated, work / "second", rows)
        file = work / "model.safetensors"
        tool = [sys.executable, "-m", "thinwire", "export", str(work / "c-model"), str(file)]
        subprocess.run(tool, check=True)
        losses = [
            float(
                subprocess.run(
                    [sys.executable, "-c", EVALUATION, size, str(path), "77"],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
            )
            for path in (first_weights(size, work), file)
        ]
    print(f"a script without thinwire: loss {losses[0]:.3f} at first, {losses[1]:.3f} now")
    found: dict[str, Any] = {"size": size, "link": arguments.link, "latency": arguments.latency}
    save(
        {**around, **found, "rows": rows, "losses": losses, "stats": ended["stats"]}, arguments.out
    )


def launch(
    job: Job, emulated: Network | None, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Run one launch; return its last event, or its error."""
    event: dict[str, Any] = {}
    try:
        for event in run_workers(job, WORKERS, emulated, folder):
            if event["event"] == "said":
                print(
                    "  ".join(f"{key} {value}" for key, value in event["row"].items()), flush=True
                )
                rows.append(event["row"])
    except WorkerError as error:
        return {"error": error}
    return event


def first_weights(size: str, work: Path) -> Path:
    """Return a file of the weights that training began with."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    file = work / "first.safetensors"
    save_file(GPT(size).bfloat16().state_dict(), file)
    return file


if __name__ == "__main__":
    main()
