"""State that is kept elsewhere, read and written on the device where it is computed."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire._devices import copies_pinned, uploaded
from thinwire.wire.bucket import apart, side_by_side

_READS_AHEAD = 4
"""Reads after which the host waits for the first: two parts of anchors and residuals."""


class Staging:
    """Reads parts of state on a device, and writes them back to where it is kept.

    A GPU copies state in pinned memory of the host on streams of its own. What `write_` copies may
    be read on the host, and by another `read`, after `finish`.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.Stream]] = {}
        """By device, for reading and for writing."""
        self._begun = deque[torch.Event]()

    def read(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return tensors of one dimension `side_by_side`; a single one on the device itself."""
        if tensors[0].device == device or not copies_pinned(device):
            return uploaded(side_by_side(tensors), device)
        if device not in self._streams:
            self._streams[device] = [torch.Stream(device) for _ in range(2)]
        reading = self._streams[device][0]
        current = torch.accelerator.current_stream(device)
        self._begun.append(current.record_event())
        if len(self._begun) > _READS_AHEAD:
            self._begun.popleft().synchronize()  # bounds the memory of what is read ahead
        with reading:
            there = side_by_side([tensor.to(device, non_blocking=True) for tensor in tensors])
        current.wait_stream(reading)
        there.record_stream(current)
        return there

    def write_(self, tensors: list[Tensor], values: Tensor) -> None:
        """Copy values back to the tensors that were read."""
        if values.data_ptr() == tensors[0].data_ptr():
            return
        numels = [tensor.numel() for tensor in tensors]
        if tensors[0].device == values.device or values.device not in self._streams:
            torch._foreach_copy_(tensors, apart(values.to(tensors[0].device), numels))
            return
        writing = self._streams[values.device][1]
        writing.wait_stream(torch.accelerator.current_stream(values.device))
        values.record_stream(writing)
        with writing:
            for tensor, part in zip(tensors, apart(values, numels), strict=True):
                tensor.copy_(part, non_blocking=True)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._begun.clear()
        for _, writing in self._streams.values():
            writing.synchronize()
