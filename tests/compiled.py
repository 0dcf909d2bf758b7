"""What most tests compile, ahead of all time limits."""

import torch

from tests.api import compile_loops
from thinwire import optim


def compile_all() -> None:
    params = [torch.nn.Parameter(torch.zeros(1))]
    compile_loops(params)
    optim.Lamb(params).compile_loops()
    optim.Lars(params, lr=0.1).compile_loops()
