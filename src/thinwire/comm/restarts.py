"""Whether torchrun can start this job again."""

import os
import warnings
from functools import cache

__all__ = ["warn_of_restarts"]

_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@cache
def warn_of_restarts() -> None:
    """Warn once, on rank 0, where torchrun may restart this job and the restart is likely to fail.

    Source: pytorch issue 135712: workers that start again meet keys of the last start in the store
    of the launcher.
    """
    restarts, shared = (
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", ""),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE"),
    )
    first = os.environ.get("RANK") == "0"
    if first and restarts.isdigit() and int(restarts) > 0 and shared == "True":
        warnings.warn(
            f"torchrun --max-restarts={restarts} fails in init_process_group on most restarts with "
            f"torch 2.13 (pytorch issue 135712): set {_VARIABLE}=1 in the environment of torchrun, "
            "on every machine",
            UserWarning,
            stacklevel=2,
        )
