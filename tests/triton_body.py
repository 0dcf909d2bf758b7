"""Whether and where the Triton kernels are tested: on a GPU, or through Triton's interpreter on the
CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL_BLOCK = 32


def require_triton() -> None:
    """Skips the module without triton; call it before the kernels are imported."""
    if find_spec("triton") is None and os.environ.get("THINWIRE_TRITON") != "required":
        pytest.skip(
            "triton is not installed (make test-triton installs it)", allow_module_level=True
        )
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def triton_kernels(block: int = SMALL_BLOCK) -> Iterator[None]:
    """The Triton body for all tensors, with blocks so small that small tensors have many; in a rank
    of the pool too."""
    with patch.dict(os.environ, {"THINWIRE_KERNELS": "triton"}):
        if DEVICE.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        from tests.api import codes, launching

        with (
            patch.object(launching, "BLOCK", block),
            patch.object(codes, "_SMALLEST_TAIL", 8),
        ):
            yield
