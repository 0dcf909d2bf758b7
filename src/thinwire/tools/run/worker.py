"""Worker process: `-m thinwire.tools.run.worker JOB.json` on every rank."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name

from thinwire.tools.run.config import Job
from thinwire.tools.run.launch import event_log


def main(job_path: str) -> None:
    """Join the group, run the job, and write its result or error into this rank's log."""
    path = Path(job_path)
    events = event_log(path.parent, int(os.environ["RANK"]))
    try:
        import torch.distributed as dist

        job = Job.read(path)
        task = resolve_name(job.task)
        dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
        result = task(job.config, events).train()
        dist.barrier()
        events.write("result", **result)
        dist.destroy_process_group()
    except BaseException as error:
        events.write("error", kind=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    main(sys.argv[1])
