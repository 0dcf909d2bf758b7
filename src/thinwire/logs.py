"""The numbers of `stats()`, given to whatever keeps a run's curves."""

from typing import Any

from thinwire import _validate as check

__all__ = ["PREFIX", "log_stats"]

PREFIX = "thinwire/"


def log_stats(source: Any, writer: Any, step: int | None = None) -> dict[str, float]:
    """Write what `source.stats()` says, under names such as `thinwire/bytes_sent`.

    The numbers are those of this rank; nothing is sent for them. Call it on rank 0 alone, or on
    every rank with a writer of its own.

    Args:
        source: Whatever has `stats()`: an `Engine`, `LocalUpdates`, `Attached`, an optimizer that
            exchanges gradients.
        writer: Something with `add_scalar(name, value, step)`, such as TensorBoard's
            `SummaryWriter`; or with `log(numbers, step=...)`, such as a run of wandb; or a function
            `(numbers, step)`. The first of these that it has is called.
        step: Place on the axis of the curves; None is the `step` of the numbers: updates made, or
            local steps.

    Returns:
        What was written. Values that are no numbers are left out.

    Raises:
        TypeError: `source` has no `stats()`, or `writer` is none of these.
        ValueError: `step` is negative.
    """
    if not callable(getattr(source, "stats", None)):
        raise TypeError(
            "source must have stats(), as Engine, LocalUpdates, Attached and optimizers that "
            f"exchange gradients, got a {type(source).__name__}"
        )
    said: dict[str, Any] = source.stats()
    step = check.integer("step", said["step"] if step is None else step, at_least=0)
    written = {
        PREFIX + name: value
        for name, value in said.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if callable(getattr(writer, "add_scalar", None)):
        for name, value in written.items():
            writer.add_scalar(name, value, step)
    elif callable(getattr(writer, "log", None)):
        writer.log(written, step=step)
    elif callable(writer):
        writer(written, step)
    else:
        raise TypeError(
            "writer must have add_scalar(name, value, step), as TensorBoard's SummaryWriter, or "
            "log(numbers, step=...), as a run of wandb, or be a function of (numbers, step); got a "
            f"{type(writer).__name__}"
        )
    return written
