"""How much of a step of dense a step of each method is worth: a prior from measured runs."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from json import loads
from math import log
from typing import Any, NamedTuple

__all__ = ["Progress", "progress_of"]


class Progress(NamedTuple):
    """What is expected of a step.

    Attributes:
        share: Steps of dense that one step is worth, until dense's last loss.
        source: The runs that it is from.
    """

    share: float
    source: str


@cache
def _measured() -> list[dict[str, Any]]:
    text = files("thinwire.planning").joinpath("progress.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = loads(text)
    return found


def progress_of(method: str, document: Mapping[str, Any], workers: int) -> Progress:
    """The measured run that is nearest: of the same method, with the nearest interval, then the
    nearest number of workers.
    """
    if method == "dense":
        return Progress(1.0, "by definition")
    interval = document.get("localsgd", {}).get("k_steps", 1)

    def distance(run: Mapping[str, Any]) -> tuple[float, float]:
        return abs(log(run["k_steps"] / interval)), abs(log(run["workers"] / workers))

    mine = [run for run in _measured() if run["method"] == method]
    nearest = min(mine, key=distance)
    share = nearest["progress"]
    source = nearest["source"]
    if nearest["k_steps"] != interval:
        source += f"; measured with k_steps={nearest['k_steps']}"
    return Progress(share, source)
