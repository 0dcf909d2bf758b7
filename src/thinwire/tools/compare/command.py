"""Command `thinwire compare`.

Torch is imported after the arguments have been checked.
"""

from functools import wraps
from typing import Any

from thinwire.tools.compare.page import BEST, write
from thinwire.tools.compare.record import Results
from thinwire.tools.compare.settings import Settings
from thinwire.tools.compare.strategies import STRATEGIES, USUAL
from thinwire.tools.compare.tables import print_table

EXAMPLES = """Examples:

thinwire compare --workers 2 --link 100mbit --steps 200 --out runs/a

thinwire compare --workers 2 --link 20mbit --strategies dense mine.yaml

thinwire compare --workers 4 --link 20mbit --latency 10ms --text ~/notes

thinwire compare --workers 2 --link 20mbit --task my_task.py:task --seconds 300

thinwire compare --workers 4 --shard 2 --link 20mbit --strategies muon-local

torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m thinwire compare

(and the same with --node-rank 1 on the other machine)
"""


@wraps(Settings.check, assigned=("__annotations__",))
def compare(**typed: Any) -> None:  # noqa: D417 - the arguments are those of Settings.check
    """Train one model under several strategies over one link; report loss against time and
    bytes.

    Prints a verdict and a table. Writes report.html, results.json and the winner's strategy file
    into the folder --out. Results so far are kept if a strategy fails, or if Ctrl-C or SIGTERM ends
    the comparison.

    Args:
        workers: Number of processes that train together; 2 by default. Each has its own network
            if the system allows it. Under torchrun, the processes that it started.
        link: Rate of each worker's link in both directions, such as 20mbit or 1gbit; 100mbit by
            default. "none" is unshaped, "loopback" uses no network namespaces. Under torchrun the
            real network is used.
        latency: One-way delay of every packet, such as 10ms.
        up: Rate at which each worker sends, such as 10mbit, if the directions differ; with --down.
        down: Rate at which each worker receives, such as 100mbit.
        loss: Share of the packets that is lost, each way, such as 0.2%.
        congestion: Congestion control of TCP, cubic or bbr; the machine's own by default.
        strategies: What to compare.
        steps: Updates per strategy; 200 by default.
        seconds: Training time per strategy, instead of --steps.
        model: transformer (next byte of a text) or convolution (the 1,797 scanned digits of
            scikit-learn, with batch normalisation).
        size: Size of the model: tiny (0.1M parameters), small (0.9M), medium (3.3M), large (19M),
            or a number such as 2M; medium by default.
        text: Folder with text to train on; by default the source of Python's standard library.
        out: Folder for the report; runs/compare-DATE-TIME by default.
        batch: Sequences of 128 bytes, or digits, per worker and step; 8 by default.
        seed: Seed of the parameters and of the order of the data.
        seeds: Runs per strategy, each with the next seed; the report gives mean and range.
        lr: Peak learning rate for all strategies, instead of each one's own.
        optimizer: adamw, muon (AdamW for all but hidden matrices), or sgd with momentum, for all
            strategies. A task with an optimizer of its own keeps it.
        task: Your own model, data and loss instead of --model, as FILE.py:NAME. The function NAME
            takes the seed and returns a thinwire.Task.
        device: cpu, cuda, or auto (cuda if there is one).
        tune: Measure the loss on the validation part of the data, for choosing settings, instead of
            the held-out part.
        timeout: Seconds that a worker waits for another, and longest silence before the comparison
            gives up. Raise it if a step or an evaluation of a task takes over ten minutes.
        shard: Number of ranks of a site. They share one link, and FSDP2 shards the model among
            them: the elements of every ModuleList, then the rest. Dense is then HSDP.
        every: Print all figures, which the report has too.
        quiet: Show no progress.
    """
    settings = Settings.check(**typed)
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
        keep(measure(settings, display_for(quiet=settings.quiet or not speaks), keep))
    except (KeyboardInterrupt, SystemExit):
        if kept:
            _print(kept[-1], settings)
        raise
    if not kept:  # rank 0 has written the report
        return
    _print(kept[-1], settings)
    if failures := kept[-1].failures:
        raise WorkerError("\n".join(f"{failure.strategy}: {failure.error}" for failure in failures))


def _print(results: Results, settings: Settings) -> None:
    print_table(results, every=settings.every)
    print(f"report: {settings.out / 'report.html'}")
    if (best := settings.out / BEST).exists():
        print(f"strategy file of {results.winner}: {best}")


compare.__doc__ = (compare.__doc__ or "").replace(
    "strategies: What to compare.",
    f"strategies: Any of {', '.join(STRATEGIES)}, or strategy files (.yaml); by default "
    f"{' '.join(USUAL)}, the last for the transformer only.",
)
