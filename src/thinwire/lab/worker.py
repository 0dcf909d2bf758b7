"""The training script: what every rank runs, started by torchrun as `-m thinwire.lab.worker
CONFIG.json`.

The configuration may name another task than training, as "module:Class" that is called and used
like `TrainingRun`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from thinwire.lab.diary import Diary
from thinwire.lab.enter import die_with_parent

__all__ = ["main"]


def main(config_path: str) -> None:
    """Joins the group, trains, and writes the result, or the error, into this rank's diary."""
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    diary = Diary(Path(config["events"]) / f"rank{os.environ['RANK']}.jsonl")
    try:
        import torch.distributed as dist

        module, _, name = config.get("task", "thinwire.lab.training:TrainingRun").partition(":")
        task = getattr(importlib.import_module(module), name)
        dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout_s"]))
        result = task(config, diary).train()
        dist.barrier()
        diary.write("result", **result)
        dist.destroy_process_group()
    except BaseException as error:
        diary.write("error", kind=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    die_with_parent(int(os.environ["THINWIRE_LAB_AGENT_PID"]))
    main(sys.argv[1])
