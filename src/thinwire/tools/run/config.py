"""Configuration of a run, written as JSON by the command and read by every worker.

Made of the standard library alone: a bad name is refused before torch is imported.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from dataclasses import field as with_default
from pathlib import Path
from typing import Any, Literal, Self

DEVICES = ("auto", "cpu", "cuda")
MOST_WORKERS = 64


class TaskError(ValueError):
    """A user's task cannot be trained; the message says what to change."""


def require_task(task: str) -> None:
    """Raise ValueError if a task cannot name a file."""
    file, _, name = task.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"task={task!r} is not FILE.py:NAME; give the file and the function that returns "
            "the task"
        )
    if not Path(file).is_file():
        raise ValueError(f"task={task!r}: {file} does not exist")


def require_nothing_beside(task: str, **options: object) -> None:
    """Refuse options that a user's task would ignore."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"--{name} is for the built-in task, but task={task!r} has its own model and "
                "data; omit one of them"
            )


def require_whole(name: str, value: object) -> None:
    """Refuse what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")


def require_within(name: str, value: int, least: int, most: int) -> None:
    """Refuse what is no whole number, and one that is out of range."""
    require_whole(name, value)
    if not least <= value <= most:
        raise ValueError(f"{name}={value} is out of range; {least:,} to {most:,} is allowed")


def require_sites(workers: int, shard: int) -> None:
    """Refuse a number of ranks for each site that does not leave two equal sites or more."""
    if shard < 1 or workers % shard or (shard > 1 and workers == shard):
        raise ValueError(
            f"shard={shard} does not divide {workers} workers into two or more sites; give the "
            "number of ranks that share a model, such as 2 with 4 workers"
        )


def require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(allowed)}")


HEAD_WIDTH = 32
_NAMED_SIZES = {"tiny": (64, 2), "small": (128, 4), "medium": (256, 4), "large": (512, 6)}
_NAMED_WIDTHS = {"tiny": 28, "small": 84, "medium": 160, "large": 388}
_SMALLEST, _LARGEST = 20_000, 200_000_000


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer: features per position, a multiple of 32, blocks, and positions."""

    width: int
    layers: int
    context: int = 128
    kind: Literal["transformer"] = "transformer"

    @property
    def about_parameters(self) -> int:
        """Parameters of the blocks, which hold most of them."""
        return 12 * self.layers * self.width**2


@dataclass(frozen=True)
class ConvolutionSize:
    """Size of the convolutional net: channels of the first layer; later ones have 2 and 4 times."""

    width: int
    kind: Literal["convolution"] = "convolution"

    @property
    def about_parameters(self) -> int:
        """Parameters of the wide convolutions, which hold most of them."""
        return 126 * self.width**2


MODELS: dict[str, type[ModelSize] | type[ConvolutionSize]] = {
    "transformer": ModelSize,
    "convolution": ConvolutionSize,
}


def size_of(model: str, text: str) -> ModelSize | ConvolutionSize:
    """Return the size of a model of `MODELS`, from text as for `parse_size`."""
    if model == "transformer":
        return parse_size(text)
    word = text.strip().lower()
    if word in _NAMED_WIDTHS:
        return ConvolutionSize(_NAMED_WIDTHS[word])
    return ConvolutionSize(max(4, round(math.sqrt(_parameters(text) / 126) / 4) * 4))


def parse_size(text: str) -> ModelSize:
    """Return the size for a name, or a number of parameters ("3M", "500k", "1000000")."""
    word = text.strip().lower()
    if word in _NAMED_SIZES:
        return ModelSize(*_NAMED_SIZES[word])
    width = round(math.sqrt(_parameters(text) / (12 * 4)) / HEAD_WIDTH) * HEAD_WIDTH
    return ModelSize(max(width, HEAD_WIDTH), 4)


def _parameters(text: str) -> float:
    count = parse_count("size", text, f"use {', '.join(_NAMED_SIZES)}, or a number such as 3M")
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(f"size={text!r} is out of range; 20k to 200M parameters are allowed")
    return count


def parse_count(name: str, text: str, advice: str) -> int:
    """Return the number of parameters in a text such as "124M"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{name}={text!r} is not a number of parameters; {advice}")
    return round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]])


OPTIMIZERS = {
    "adamw": "AdamW (betas 0.9 and 0.95, weight decay 0.1)",
    "muon": "thinwire.optim.Muon for hidden matrices, AdamW for the rest (momentum 0.95, "
    "betas 0.9 and 0.95, weight decay 0.1)",
    "sgd": "SGD with momentum 0.9",
}
"""Optimizers by name."""


@dataclass(frozen=True)
class Recipe:
    """One strategy that can be compared, as plain data."""

    name: str
    summary: str
    trainer: str
    rates: Mapping[str, float]
    counted_by: str
    options: Mapping[str, Any] = with_default(default_factory=dict)
    field: str | None = None
    ramp: str | None = None
    code: str | None = None
    file: str | None = None
    optimizer: str | None = None
    hook: str = ""
    """Hook of torch, if it is one."""

    def document(self, ramp_steps: int) -> dict[str, Any] | None:
        """Content of the strategy file; None for torch's own hooks."""
        if self.field is None:
            return None if self.hook else dict(self.options.get("document", {}))
        ramp = {self.ramp: ramp_steps} if self.ramp else {}
        return {self.field: {**self.options, **ramp}}

    def arguments(self, ramp_steps: int) -> dict[str, Any]:
        """Keyword arguments of the trainer."""
        if self.options:
            return {"document": self.document(ramp_steps)}
        return {"hook": self.hook}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that a comparison and each of its runs share."""

    model: ModelSize | ConvolutionSize
    steps: int | None
    seconds: float | None
    batch: int
    seed: int
    optimizer: str
    lr: float | None
    task: str | None
    device: str
    evaluations: int = 16
    shard: int = 1

    @property
    def shared(self) -> dict[str, Any]:
        """Return these fields by name."""
        return {item.name: getattr(self, item.name) for item in fields(Training)}


@dataclass(frozen=True, kw_only=True)
class RunConfig(Training):
    """Configuration of one training, the same on every rank."""

    recipe: Recipe
    ramp_steps: int
    train_file: str
    held_out_file: str
    held_out_sequences: int
    interface: str | None
    launched_unix_s: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from the result of `asdict`."""
        model = MODELS[values["model"]["kind"]](**values["model"])
        return cls(**{**values, "recipe": Recipe(**values["recipe"]), "model": model})


@dataclass(frozen=True, kw_only=True)
class Job:
    """Task of the workers of one launch."""

    task: str
    config: Mapping[str, Any]
    timeout_s: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job that `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


PASS_S = {False: 0.8e-9, True: 3e-12}
"""Seconds to read and write a number once, on a core and on a GPU."""
_FLOP_S = {False: 1e11, True: 4.5e13}
"""Operations a second in Muon's products, on a core in float32 and on a GPU in bfloat16, there
with matrices of `_SIDE` (benchmarks/results/gpu.json)."""
_SIDE, _MOST_FASTER = 768, 7.0
"""On a GPU the rate grows with the side, up to a third of what an H200 can do by its data sheet:
assumed, not measured."""
_MUON_PASSES = 8
"""Passes over the numbers that Muon makes beside its products, above AdamW's."""


def _muon_flops(short: float, long: float, *, cuda: bool) -> float:
    """Return the operations of Muon's five iterations for a matrix; see `newton_schulz`."""
    if cuda or 2 * long <= 3 * short:
        return 20 * short**2 * long + 10 * short**3
    return 4 * short**2 * long + 34 * short**3


def muon_seconds(
    shapes: Iterable[Sequence[int]], *, cuda: bool, flop_s: float | None = None
) -> float:
    """Return by how much an update of these matrices by Muon is longer than by AdamW."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    flops = sum(_muon_flops(*pair, cuda=cuda) for pair in sides)
    largest = max((short for short, _ in sides), default=0)
    faster = min(_MOST_FASTER, max(1.0, largest / _SIDE)) if cuda else 1.0
    passes_s = _MUON_PASSES * sum(map(math.prod, sides)) * PASS_S[cuda]
    return flops / (flop_s or faster * _FLOP_S[cuda]) + passes_s
