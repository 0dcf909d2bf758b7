"""What older versions of torch lack; 2.9 is the oldest that works."""

import torch

__all__ = ["add_adagrad_state"]


def add_adagrad_state(optimizer: torch.optim.Adagrad) -> None:
    """Make the state of parameters in groups that were added later, as torch 2.13 does in `step`.
    Before that, torch makes it in the constructor alone.
    """
    for group in optimizer.param_groups:
        late = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        if late:
            initial = optimizer.defaults["initial_accumulator_value"]
            made = torch.optim.Adagrad(
                late, initial_accumulator_value=initial, fused=group["fused"]
            )
            optimizer.state.update(made.state)
