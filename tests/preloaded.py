"""What every process of the pool has in memory when it starts, so that starting one takes
milliseconds.

The server that forks them imports this once. It must start no threads of torch: a fork does not
take them along.
"""

import gc

import torch

import thinwire.strategy.engine  # noqa: F401
from tests.compiled import compile_all

torch.set_num_threads(1)
compile_all()
_parameter = torch.nn.Parameter(torch.zeros(1))
_parameter.grad = torch.ones(1)
torch.optim.SGD([_parameter], 0.1).step()  # torch's first one imports for a second
gc.freeze()  # no collection in a forked process looks at, or copies, what lies here
