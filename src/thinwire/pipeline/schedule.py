"""torch's schedules over thinwire's stages."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from thinwire.comm.nodes import Grid
from thinwire.pipeline.config import Pipeline
from thinwire.pipeline.worker import Parcel, StageWorker

__all__ = ["make_schedule"]


def make_schedule(
    worker: StageWorker,
    config: Pipeline,
    grid: Grid,
    device: torch.device,
    *,
    source: Parcel | None,
    result: Parcel | None,
    backward: bool,
) -> PipelineScheduleSingle:
    """Return the schedule of this rank. Call its `step` (or `eval`) without inputs; on the last
    stage pass `micro_batches` dummy targets. It does not scale gradients.

    1F1B needs at least as many micro-batches as stages. With fewer, or without a backward pass, it
    saves nothing; the order is then GPipe's, with the same result.

    Args:
        worker: Runs the stage; takes and returns tensors as in `source` and `result`.
        config: Number of micro-batches, and the schedule's name.
        grid: The ranks.
        device: Device of the stage.
        source: Parcel from the previous stage; None on the first stage.
        result: Parcel for the next stage; None on the last.
        backward: True if there is a backward pass.
    """
    meta = torch.device("meta")
    stage = _Stage(
        grid,
        worker,
        device,
        inputs=source.blanks(meta) if source else (),
        outputs=result.blanks(meta) if result else (torch.empty((), device=meta),),
    )
    has_gain = backward and config.micro_batches >= config.stages
    kind = Schedule1F1B if config.schedule == "1f1b" and has_gain else ScheduleGPipe
    # the worker of the last stage computes the loss
    return kind(stage, config.micro_batches, lambda output, _: output, scale_grads=False)


class _Stage(PipelineStage):
    """A stage with declared inputs, so that no memory is read before it was written."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # gloo connects when a group is made; torch 2.9 sends 8 bytes here where 4 are expected
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()

    def __init__(
        self,
        grid: Grid,
        worker: StageWorker,
        device: torch.device,
        *,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
    ) -> None:
        self._grid, self._worker, self._inputs = grid, worker, inputs
        super().__init__(
            worker,
            grid.stage,
            grid.stages,
            device,
            input_args=inputs,
            output_args=outputs,
            group=grid.stage_group,
        )

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the grid. It is looked up, since a reference kept here would not be
        freed at exit.
        """
        return self._grid.stage_group

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        pass

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run torch's method. On an error, keep the error for the end and send zeros to the
        previous stage.
        """
        self.bwd_cache[bwd_chunk_id] = tuple(
            torch.zeros(blank.shape, dtype=blank.dtype, device=self.device)
            if blank.requires_grad
            else None
            for blank in self._inputs
        )

        def backward() -> None:
            try:
                super(_Stage, self).backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:  # torch hides the cause behind a list of shapes
                raise error.__cause__ or error from None

        self._worker.guarded(backward)
