"""Instructions to train one's own model by the strategy that a comparison recommends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thinwire._files import replace_file

__all__ = ["BEST", "ToUse", "strategy_text", "to_use", "write_best"]

BEST = "best-strategy.yaml"
_FIRST_LINE = "# Written by thinwire compare: "


@dataclass(frozen=True)
class ToUse:
    """The text to copy, and its use."""

    strategy: str
    how: str
    text: str
    is_file: bool


def to_use(results: Mapping[str, Any], winner: str | None) -> ToUse | None:
    """The text to copy for the strategy `winner`; None where there is none, or nothing is known
    of it.
    """
    run = next((run for run in results["strategies"] if run["strategy"] == winner), None)
    if run is None:
        return None
    optimizer = run["settings"].get("optimizer", results["settings"]["optimizer"].split(";")[0])
    name, rate = (
        run["strategy"],
        f"{optimizer} and a peak learning rate of {run['settings']['lr']:g}",
    )
    if run["document"] is not None:
        how = (
            f"The strategy file, also beside this report as {BEST}: "
            "thinwire.DistributedStrategy.load(path) reads it, prepare(model, optimizer, loss_fn) "
            f"makes the engine. Here it trained with {rate}."
        )
        return ToUse(name, how, _file_text(run["document"], rate, results), True)
    if run["code"] is not None:
        how = (
            "It is a communication hook of torch for DistributedDataParallel. Here it trained "
            f"with {rate}."
        )
        return ToUse(name, how, run["code"], False)
    return None


def write_best(results: Mapping[str, Any], winner: str | None, folder: Path) -> Path | None:
    """Write the winner's strategy file into `folder`, in one piece, and return its path.

    Where there is none, one that an earlier comparison has left there is taken away.
    """
    path = folder / BEST
    use = to_use(results, winner)
    if use is not None and use.is_file:
        replace_file(path, use.text.encode())
        return path
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(
        _FIRST_LINE
    ):
        path.unlink()
    return None


def _file_text(document: Mapping[str, Any], rate: str, results: Mapping[str, Any]) -> str:
    text = strategy_text(document)
    return f"{_FIRST_LINE}{results['headline']}\n# It trained with {rate}.\n{text}"


def strategy_text(document: Mapping[str, Any]) -> str:
    """Return the strategy file of a document, as `DistributedStrategy.save` writes it."""
    from thinwire.strategy.distributed_strategy import DistributedStrategy

    with TemporaryDirectory() as folder:
        path = Path(folder) / BEST
        DistributedStrategy.from_dict(document).save(path)
        return path.read_text(encoding="utf-8")
