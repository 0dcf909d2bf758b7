"""A replacement of a module's forward, an object that can be copied with it and taken off again;
and the one for automatic mixed precision.
"""

from typing import Any

import torch
from torch import nn

from thinwire import _validate as check

__all__ = ["Autocast", "ForwardLayer"]


class ForwardLayer:
    """A layer that is `module.forward` and calls what was there before; layers may be put on and
    taken off in any order.

    It is an object that holds its module, not a closure: a copied or unpickled module has a layer
    of its own, which calls that module. Names, types and state_dict of the module stay as they are.

    Args:
        module: Changed: gets this layer as its `forward`.

    Raises:
        TypeError: A scripted module, whose forward is compiled code.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{type(module).__name__} is a scripted module, whose forward cannot be replaced: "
                "give the module that was scripted"
            )
        self.module = module
        self.active = True
        """False: only calls what stood there before."""
        self.inner: Any = vars(module).get("forward")
        """The forward that was there before; None for the method of the class."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or the forward below it where the layer is not active."""
        return self._around(*args, **kwargs) if self.active else self._inside(*args, **kwargs)

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; ends in `_inside`."""
        raise NotImplementedError(f"{type(self).__name__} must define _around(*args, **kwargs)")

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        # looked up at every call, since lazy modules change their class in the first one
        if self.inner is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def remove(self) -> None:
        """Take the layer off, wherever it stands; may be called twice."""
        self.active = False
        above: ForwardLayer | None = None
        layer = vars(self.module).get("forward")
        while isinstance(layer, ForwardLayer) and layer is not self:
            above, layer = layer, layer.inner
        if layer is not self:  # somebody wrapped it since, so it stays there and does nothing
            return
        if above is not None:
            above.inner = self.inner
        elif self.inner is None:
            del self.module.forward
        else:
            self.module.forward = self.inner


_DTYPES = (torch.bfloat16, torch.float16)


class Autocast(ForwardLayer):
    """Lets the forward pass of a model run under autocast, in training and in evaluation, in any
    loop, until `remove`.

    Parameters, optimizer state and gradients keep their types. Outputs may have the narrow type;
    the loss belongs under autocast too, which computes it in float32.

    Args:
        module: Changed: gets a `forward` of its own, which is copied and pickled with it.
        dtype: `torch.bfloat16` or `torch.float16`.

    Raises:
        TypeError: No module, or a scripted one.
        ValueError: Another dtype.

    Source: Micikevicius et al., 2018, arXiv 1710.03740; torch.autocast.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        check.instance("model", module, nn.Module)
        check.one_of("dtype", dtype, _DTYPES)
        super().__init__(module)
        self.dtype = dtype

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        # asked at every call: the model may have moved
        param = next(self.module.parameters(), None)
        with torch.autocast("cpu" if param is None else param.device.type, dtype=self.dtype):
            return self._inside(*args, **kwargs)
