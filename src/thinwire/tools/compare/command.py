"""`thinwire compare` as a function of what was typed.

Torch is imported after the arguments have been checked.
"""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from thinwire.tools.app import Count
from thinwire.tools.compare.page import BEST, write
from thinwire.tools.compare.record import Results
from thinwire.tools.compare.settings import Settings
from thinwire.tools.compare.strategies import STRATEGIES, USUAL
from thinwire.tools.compare.tables import print_table

EXAMPLES = """Examples:

thinwire compare --workers 2 --link 100mbit --strategies dense muon-local --steps 200 --out runs/a

thinwire compare --workers 2 --link 20mbit --strategies dense sparse-local mine.yaml --seconds 300

thinwire compare --workers 4 --link 20mbit --latency 10ms --seconds 300 --text ~/notes

thinwire compare --workers 2 --link 20mbit --task my_task.py:task --seconds 300

torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500
    -m thinwire compare --strategies dense sparse-local --seconds 300

(and the same with --node-rank 1 on the other machine)
"""


def compare(
    *,
    workers: Count | None = None,
    link: str | None = None,
    latency: str = "0ms",
    strategies: Annotated[
        tuple[str, ...] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    steps: Count | None = None,
    seconds: float | None = None,
    model: str = "transformer",
    size: str | None = None,
    text: Path | None = None,
    out: Path | None = None,
    batch: Count | None = None,
    seed: Count = 0,
    seeds: Count = 1,
    lr: float | None = None,
    optimizer: str = "adamw",
    task: str | None = None,
    device: str = "auto",
    tune: Annotated[bool, Parameter(negative="")] = False,
    timeout: float | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a small model under several strategies over the same link; report loss against time and
    bytes.

    Prints a verdict and tables, and writes report.html, results.json and the winner's strategy file
    into the folder --out. What has finished is kept when Ctrl-C or SIGTERM ends the comparison, or
    a strategy fails.

    Args:
        workers: Processes that train together, each in a network of its own where the system allows
            it; 2 unless it is given. Under torchrun those that it has started.
        link: Rate of each worker's link in both directions, such as 20mbit or 1gbit; "none" is
            unshaped, "loopback" uses no network namespaces; 100mbit unless it is given. Under
            torchrun the real network is used.
        latency: One-way delay of every packet, such as 10ms.
        strategies: What to compare.
        steps: Updates per strategy; 200 unless --seconds is given.
        seconds: The same training time for every strategy, instead of --steps.
        model: transformer, which predicts the next byte of a text, or convolution, which tells the
            1,797 scanned digits of scikit-learn apart, by a net with batch normalisation.
        size: Of the model: tiny (0.1M parameters), small (0.9M), medium (3.3M), large (19M), or a
            number such as 2M; medium unless given.
        text: Folder with text to train on; otherwise the source files of Python's own standard
            library.
        out: Folder for the report; otherwise runs/compare-DATE-TIME.
        batch: Sequences of 128 bytes, or digits, per worker and step; 8 unless given.
        seed: Of the parameters and of the order of the data.
        seeds: Runs of every strategy, each with the next seed; the report gives mean and range.
        lr: Peak learning rate for all strategies, instead of each one's own.
        optimizer: adamw, muon (AdamW for what is no hidden matrix), or sgd with momentum; the same
            for all strategies. A task that makes its own is trained by that.
        task: A model, data and loss of your own instead of --model: FILE.py:NAME, where the
            function NAME gets the seed and gives a thinwire.Task.
        device: cpu, cuda, or auto, which is cuda where there is one.
        tune: Take the loss on the part of the data that is kept for choosing settings, not on the
            held-out part.
        timeout: Seconds that a worker waits for another one, and after which the comparison gives
            up where it hears nothing; more is needed only where a step or an evaluation of a task
            takes more than ten minutes.
        quiet: Show no progress.
    """
    if out is None:
        out = Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    typed = {name: value for name, value in locals().items() if name != "quiet"}
    settings = Settings.check(**typed)
    _run(settings, quiet)


def _run(settings: Settings, quiet: bool) -> None:
    from thinwire.tools.compare.compare import compare as measure
    from thinwire.tools.report.progress import display_for
    from thinwire.tools.run.launch import WorkerError

    kept: list[Results] = []
    speaks = settings.joined_rank in (None, 0)

    def keep(results: Results) -> None:
        if speaks:
            write(results, settings.out)
            kept.append(results)

    try:
        keep(measure(settings, display_for(quiet=quiet or not speaks), keep))
    except (KeyboardInterrupt, SystemExit):
        if kept:
            _print(kept[-1], settings.out)
        raise
    if not kept:  # rank 0 has written the report
        return
    _print(kept[-1], settings.out)
    if failures := kept[-1].failures:
        raise WorkerError("\n".join(f"{failure.strategy}: {failure.error}" for failure in failures))


def _print(results: Results, out: Path) -> None:
    print_table(results)
    print(f"report: {out / 'report.html'}")
    if (out / BEST).exists():
        print(f"strategy file of {results.winner}: {out / BEST}")


compare.__doc__ = (compare.__doc__ or "").replace(
    "strategies: What to compare.",
    f"strategies: What to compare, {', '.join(STRATEGIES)}, or strategy files (.yaml); "
    f"{' '.join(USUAL)} unless it is given, the last of them for the transformer only.",
)
