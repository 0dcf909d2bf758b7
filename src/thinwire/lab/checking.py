"""Every strategy file is tried on the model before the first strategy trains: a task for the
workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch.distributed as dist

from thinwire.errors import Mismatch, NonFinite
from thinwire.lab.diary import Diary
from thinwire.lab.rehearsal import rehearse
from thinwire.lab.training import initial_model

__all__ = ["Check"]

_BATCH = 1


@final
class Check:
    """Rehearses one strategy after the other on all ranks; the result says which were refused, and
    why.
    """

    def __init__(self, config: Mapping[str, Any], diary: Diary) -> None:
        self.config, self.diary = config, diary

    def train(self) -> dict[str, Any]:
        """Name and error of every strategy that does not go with the model."""
        model = initial_model(self.config)
        refused: dict[str, str] = {}
        for candidate in self.config["candidates"]:
            self.diary.write("checking", strategy=candidate["strategy"])
            try:
                rehearse({**self.config, **candidate}, model, _BATCH)
            except (
                TypeError,
                ValueError,
                Mismatch,
            ) as error:  # of `prepare`, which raises on all ranks or on none
                refused[candidate["strategy"]] = f"{type(error).__name__}: {error}"
            except NonFinite:
                # on all ranks too, and a matter of rates, not of the model: the training will tell
                continue
            dist.barrier()
        return {"refused": refused}
