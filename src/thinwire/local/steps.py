"""Follow the local steps of a training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.core.sharded import shard_of
from thinwire.local.model import calls_of_step


class FollowedSteps:
    """Hook `step` of optimizers; a local step ends when each has made one, or one a second."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        before: Callable[[], None],
        observed: Callable[[], None],
        stepped: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        # observed: before an optimizer steps, and after a closure; stepped: before one, and after
        self._optimizers, self._made = optimizers, set[int]()
        self._before, self._observed = before, observed
        self._stepped, self._after = stepped, after
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_one),
                optimizer.register_step_post_hook(self._after_one),
            )
        ]

    def remove(self) -> None:
        """Remove the hooks; may be called twice."""
        self._made.clear()
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """End a local step that only some optimizers have made."""
        if self._made:
            self._made.clear()
            self._after()

    def _before_one(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the start of one step, with all arguments of `step`, the optimizer first."""
        optimizer, *given = args
        if calls_of_step(optimizer) > 1:
            return None
        if not self._made:
            self._before()
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._observed()
            return None

        def then_observed() -> Any:
            self._stepped()
            loss = closure()
            self._observed()
            return loss

        if given:
            return (optimizer, then_observed, *given[1:]), kwargs
        return (optimizer,), {**kwargs, "closure": then_observed}

    def _after_one(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if calls_of_step(optimizer) > 1:
            return
        self._stepped()
        again = id(optimizer) in self._made
        self._made.add(id(optimizer))
        if again or len(self._made) == len(self._optimizers):
            self._made = {id(optimizer)} if again else set()
            self._after()


class _Accesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Addresses of the memory that operations read, and that copies overwrite."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read, self.written = set[int](), set[int]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view:
            copies = op.name() in ("aten::copy_", "aten::_foreach_copy_")
            self.written |= _addresses(args[:copies])
            self.read |= _addresses(args[copies:])
        return op(*args, **(kwargs or {}))


def _addresses(tree: Any) -> set[int]:
    tensors = (shard_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}


@contextmanager
def overwritten(params: Mapping[str, Tensor], names: set[str]) -> Iterator[None]:
    """Add the names of parameters that are written in the block without being read there."""
    # the storages stay alive, so that nothing else gets their addresses
    before = {name: param.untyped_storage() for name, param in params.items()}
    with _Accesses() as accesses:
        yield
    for name, storage in before.items():
        address, now = storage.data_ptr(), params[name].untyped_storage().data_ptr()
        if address not in accesses.read and (address in accesses.written or address != now):
            names.add(name)
