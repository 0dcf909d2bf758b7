"""A job of the workers that probes."""

from collections.abc import Mapping
from typing import Any

from tests.api import Events, parse_size, probe


class Probing:
    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        events.write("prepared")
        events.wait_for_release()

    def train(self) -> dict[str, Any]:
        return probe(None, parse_size("tiny"), 2, "cpu")
