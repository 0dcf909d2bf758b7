"""Writes the numbers of `stats()` to a logger of curves."""

from typing import Any

from thinwire import _validate as check
from thinwire._wording import shown

PREFIX = "thinwire/"


def log_stats(source: Any, writer: Any, step: int | None = None) -> dict[str, float]:
    """Write the numbers of `source.stats()` under names such as `thinwire/bytes_sent`.

    They are this rank's; nothing is exchanged. Call it on rank 0, or on every rank with its writer.

    Example::

        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter("runs/dgc") as writer:
            log_stats(engine, writer)

    Args:
        source: Any object with `stats()`: an `Engine`, `LocalUpdates`, `Attached`, an optimizer
            that exchanges gradients.
        writer: The logger. The first of these methods that it has is called: `add_scalar(name,
            value, step)`, as TensorBoard's `SummaryWriter`; `log_metrics(numbers, step=...)`, as
            the module `mlflow`, an experiment of Comet or a logger of Lightning; `track(value,
            name=..., step=...)`, as a `Run` of Aim; `log(numbers, step=...)`, as a run of W&B or
            trackio, an `Accelerator` or a tracker of Accelerate. A client of MLflow comes with the
            run: `(client, run_id)`, or has an attribute `run_id`. Or a function `(numbers, step)`.
            Or "http://ADDRESS:PORT", on every rank: rank 0 serves a live page of all ranks there,
            and logs its link, which beyond loopback has a token.
        step: Position on the axis of the curves. None takes the `step` of the numbers: updates
            made, or local steps.

    Returns:
        The numbers written. Other values are left out.

    Raises:
        TypeError: `source` has no `stats()`, or `writer` is none of these.
        ValueError: `step` is negative.
    """
    if not callable(getattr(source, "stats", None)):
        raise TypeError(
            "source must have stats(), as Engine, LocalUpdates, Attached and optimizers that "
            f"exchange gradients, got a {type(source).__name__}"
        )
    stats: dict[str, Any] = source.stats()
    step = check.integer("step", stats["step"] if step is None else step, at_least=0)
    written = {
        PREFIX + name: value
        for name, value in stats.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if isinstance(writer, str) and writer.startswith("http://"):
        from thinwire.page.server import show_rank

        show_rank(writer, stats, getattr(source, "_last_loss", None))
    else:
        _write(writer, written, step)
    return written


def _write(writer: Any, numbers: dict[str, float], step: int) -> None:
    pair = isinstance(writer, tuple) and len(writer) == 2
    client, run = writer if pair else (writer, getattr(writer, "run_id", None))

    def has(method: str) -> bool:
        return callable(getattr(client, method, None))

    if has("add_scalar"):
        for name, value in numbers.items():
            client.add_scalar(name, value, step)
    elif has("log_metrics"):
        client.log_metrics(numbers, step=step)
    elif has("log_metric") and run is not None:
        for name, value in numbers.items():
            client.log_metric(run, name, value, step=step)
    elif has("track"):
        for name, value in numbers.items():
            client.track(value, name=name, step=step)
    elif has("log"):
        client.log(numbers, step=step)
    elif callable(writer):
        writer(numbers, step)
    else:
        raise TypeError(
            "writer must have add_scalar(name, value, step), log_metrics(numbers, step=...), "
            "track(value, name=..., step=...) or log(numbers, step=...), or be a pair of an MLflow "
            "client and its run_id, a function of (numbers, step), or 'http://ADDRESS:PORT'; got "
            f"{shown(writer)} of type {type(writer).__name__}"
        )
