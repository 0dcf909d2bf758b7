"""The config of a pipeline."""

from dataclasses import dataclass

from thinwire import _validate as check


@dataclass(frozen=True)
class Pipeline:
    """Splits the model into stages on consecutive ranks. Ranks / stages replicas of the pipeline
    train in parallel.

    Example:
        >>> Pipeline(stages=2, micro_batches=4).schedule
        '1f1b'

    Attributes:
        stages: Parts of the model, >= 1; the number of ranks must be a multiple of it.
        micro_batches: Equal parts into which every rank's mini-batch is cut, >= 1.
        schedule: "1f1b" (fewer live activations) or "gpipe" (all forward passes first); the result
            is the same.
        split_points: Names of the modules at which stages 2, 3, ... begin, in execution order;
            empty: a sequential model is cut by itself, balanced by parameter count.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: GPipe, arXiv 1811.06965; PipeDream (1F1B), arXiv 1806.03377.
    """

    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    split_points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "stages", "micro_batches", at_least=1)
        check.instance("schedule", self.schedule, str, advice='write "1f1b" or "gpipe"')
        check.one_of("schedule", self.schedule, ("1f1b", "gpipe"))
        advice = 'write a single name as ("blocks.4",)'
        check.set_fields(self, check.words, "split_points", advice=advice)
        points = self.split_points
        if len(set(points)) != len(points):
            raise ValueError(f"split_points must be different modules, got {list(points)}")
        if points and len(points) != self.stages - 1:
            raise ValueError(
                f"split_points must name the first modules of stages 2 to {self.stages} "
                f"({self.stages - 1} names), got {len(points)}: {list(points)}"
            )
