"""Removable replacements of a module's forward that are copied with it, such as autocast."""

from typing import Any

import torch
from torch import nn


class ForwardLayer:
    """A layer that replaces `module.forward` and calls the forward below it. The layer on top is
    removed first.

    The layer is an object that holds its module, not a closure. A copied or unpickled module thus
    has its own layer, which calls that module.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{type(module).__name__} is a scripted module, whose forward cannot be replaced: "
                "give the module that was scripted"
            )
        self.module = module
        self.active = True
        """True if the layer runs; False if it only calls the forward below it."""
        self.inner: Any = vars(module).get("forward")
        """The forward below this layer; None for the method of the class."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or only the forward below it if the layer is not active."""
        return self._around(*args, **kwargs) if self.active else self._inside(*args, **kwargs)

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer. It calls `_inside` for the forward below."""
        raise NotImplementedError

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        # looked up at every call, since lazy modules change their class in the first call
        if self.inner is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def remove(self) -> None:
        """Remove the layer; below other code that wraps it, it stays, inactive. May be called
        twice.
        """
        self.active = False
        if vars(self.module).get("forward") is not self:
            return
        if self.inner is None:
            del self.module.forward
        else:
            self.module.forward = self.inner


class Autocast(ForwardLayer):
    """Runs the forward pass of a model under autocast, in training and in evaluation, until
    `remove`. Outputs may have the narrow type; the loss belongs under autocast too.

    >>> model = nn.Linear(2, 1)
    >>> autocast = Autocast(model, torch.bfloat16)
    >>> model(torch.ones(1, 2)).dtype
    torch.bfloat16
    >>> autocast.remove()

    Source: Micikevicius et al., 2018, arXiv 1710.03740; torch.autocast.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        # looked up at every call: the model may have moved
        param = next(self.module.parameters(), None)
        with torch.autocast("cpu" if param is None else param.device.type, dtype=self.dtype):
            return self._inside(*args, **kwargs)
