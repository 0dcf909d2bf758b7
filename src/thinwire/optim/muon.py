"""Muon for matrices and AdamW for all other parameters, as one optimizer with one learning rate."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire.core.muon import MuonRule
from thinwire.core.tensors import named_dtype, state_dtype
from thinwire.optim.common import CommonOwn
from thinwire.optim.owners import Matrix, Owners
from thinwire.optim.torch_classes import TorchOptimizer, unhooked_step

_ADAMW_ONLY = {
    "decoupled_weight_decay": True,
    "amsgrad": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


def _rule(param: Tensor, group: Mapping[str, Any]) -> MuonRule:
    # a CPU without instructions for bfloat16 takes four times as long in it
    usual = state_dtype(param) if param.is_cpu else torch.bfloat16
    chosen = group["ns_dtype"]
    same = {key: group[key] for key in ("weight_decay", "momentum", "nesterov", "eps")}
    return MuonRule(
        **same,
        coefficients=tuple(group["ns_coefficients"]),
        iterations=group["ns_steps"],
        match_rms_adamw=group["adjust_lr_fn"] == "match_rms_adamw",
        dtype=getattr(torch, chosen) if chosen else usual,
    )


class Muon(TorchOptimizer):
    """Muon for matrices and `torch.optim.AdamW` for all other parameters.

    With `ns_dtype="bfloat16"` and float32 parameters, the bits equal those of `torch.optim.Muon`
    and AdamW side by side.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> optimizer = Muon(muon_groups(model), lr=1e-3)

    In a group whose key `muon` is true (the default), Muon updates the real parameters of two
    dimensions. If its key `conv` is true, Muon also updates those of more dimensions, as matrices
    (first, all else). AdamW updates all others. Embeddings and the output layer are matrices too
    but train better with AdamW: pass `muon_groups(model)`, or groups of your own. Muon itself sees
    no model and cannot warn; `prepare` and `local_sgd` do.

    Parameters may be sharded by `fully_shard`, also on torch's two-dimensional mesh: with local
    updates, in an engine, or without either. Each rank keeps its shard of the momentum. In a step
    one rank, the owner of a matrix, gathers it whole and orthogonalises it. Ranks share the work.
    On a CPU the bits equal those of whole matrices in one process. **Communication**, only between
    the shards of one model: each rank sends its shard of a matrix to the owner, in the gradient's
    dtype, and receives its shard of the result, in the dtype of the iteration. The next matrices
    travel meanwhile. Then they compare sums of all bits, 16 bytes for each rank. **Failure**: an
    error of `thinwire.errors` within the time-out of the mesh's process group, `PayloadCorrupt` on
    all ranks for a damaged bit; nothing has moved then.

    On other devices than a CPU, whole matrices of one shape are one batch of up to 2^24 numbers.

    With `adjust_lr_fn="match_rms_adamw"` an update of a matrix has the RMS of AdamW's. The rate,
    schedule and weight decay of AdamW then suit both.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        weight_decay: Decoupled, p shrinks by lr * weight_decay * p, >= 0.
        momentum: Momentum of Muon, >= 0.
        nesterov: True for Nesterov momentum in Muon.
        betas: Decay of AdamW's moments, in [0, 1).
        eps: Epsilon of AdamW, and the smallest norm that Muon divides by.
        ns_coefficients: Three, of the Newton-Schulz iteration, as in torch.
        ns_steps: Iterations of it, as in torch.
        ns_dtype: Type of the iteration, "float32" or "bfloat16" (or a torch dtype). None: bfloat16
            as in torch, but float32 on a CPU (float64 for float64 parameters), where bfloat16 takes
            about four times as long unless the processor has instructions for it.
        adjust_lr_fn: "match_rms_adamw" or "original", as in torch.
        common: `grad_clip`, `regularizer` (through the gradient) and `exclude_from_weight_decay` as
            in `SGD`; `maximize` to maximize the objective; `foreach` of AdamW, which changes speed
            only.

    Raises:
        TypeError, ValueError: As in `SGD`.

    Source: Jordan et al., 2024, kellerjordan.github.io/posts/muon; the rate that matches AdamW's:
    Liu et al., 2025, arXiv 2502.16982; the coefficients and iterations of torch.optim.Muon;
    torch.optim.AdamW.
    """

    takes_shards = True
    """True if matrices may be sharded over ranks."""
    _owners: Owners | None = None

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_dtype: str | torch.dtype | None = None,
        adjust_lr_fn: str = "match_rms_adamw",
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {
            "muon": True,
            "conv": False,
            "adam_lr_scale": 1.0,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": named_dtype("ns_dtype", ns_dtype),
            "adjust_lr_fn": adjust_lr_fn,
            **_ADAMW_ONLY,
        }
        self._construct(params, lr, values, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        super()._check_hyperparameters(values)
        check.boolean("muon", values["muon"])
        check.boolean("conv", values["conv"])
        check.real("adam_lr_scale", values["adam_lr_scale"], at_least=0)
        numbers = values["ns_coefficients"]
        check.sequence(check.real, "ns_coefficients", numbers, advice="give three numbers")
        if len(numbers) != 3:
            raise ValueError(f"ns_coefficients has {len(numbers)} numbers; give three")
        check.integer("ns_steps", values["ns_steps"], at_least=1)
        if values["ns_dtype"] is not None:
            check.one_of("ns_dtype", values["ns_dtype"], ("float32", "bfloat16"))
        check.one_of("adjust_lr_fn", values["adjust_lr_fn"], ("match_rms_adamw", "original"))

    def _torch_step(self) -> None:
        given = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p, _ in given):
            raise RuntimeError(
                "Muon needs dense gradients and got a sparse one: build the embedding with "
                "sparse=False"
            )
        matrices = [self._matrix(p, group) for p, group in given if _is_of_muon(p, group)]
        self._owners = self._owners or Owners()
        self._owners.update_(matrices)
        groups = [
            {
                **g,
                "params": [p for p in g["params"] if not _is_of_muon(p, g)],
                "lr": g["lr"] * g.get("adam_lr_scale", 1.0),  # not in states saved before 0.4
            }
            for g in self.param_groups
        ]
        rest = [p for g in groups for p in g["params"]]
        if rest:
            optimizer = torch.optim.AdamW(rest[:1])
            optimizer.param_groups = groups
            optimizer.state = self.state
            unhooked_step(torch.optim.AdamW)(optimizer)

    def misplaced(self, model: nn.Module) -> list[str]:
        """Return the names of matrices that it trains with Muon and `muon_groups(model)` would give
        to AdamW. None without an embedding, and if a group has `muon` false: that was chosen.
        """
        embeds = any(isinstance(module, _EMBEDDINGS) for module in model.modules())
        if not embeds or not all(group["muon"] for group in self.param_groups):
            return []
        own = {p for g in self.param_groups for p in g["params"] if _is_of_muon(p, g)}
        adamw = (g["params"] for g in muon_groups(model) if not g["muon"])
        return [name for pairs in adamw for name, p in pairs if p in own]

    def _matrix(self, param: Tensor, group: Mapping[str, Any]) -> Matrix:
        assert param.grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        buffer, rate = state["momentum_buffer"], float(group["lr"])
        return Matrix(self._label(param), param, param.grad, buffer, rate, _rule(param, group))

    def _is_plain(self) -> bool:
        # the update of matrices does not implement maximize
        return super()._is_plain() and not any(g["maximize"] for g in self.param_groups)


def muon_groups(
    model: nn.Module, conv: bool = False, adam_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return a model's named parameters in two groups for `Muon`: hidden layers, and those for
    AdamW.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    >>> [[name for name, _ in group["params"]] for group in muon_groups(model)]
    [['1.weight', '1.bias'], ['0.weight', '2.weight', '2.bias']]

    The second group holds embeddings, tensors tied to them, and the last `nn.Linear` of
    `model.modules()`, which is the output layer of most models. If yours has another one, build the
    groups yourself.

    Args:
        model: Whole, or sharded by `fully_shard`.
        conv: True to train convolution kernels with Muon, as matrices of (out, all else); False for
            AdamW.
        adam_lr_scale: Rate of AdamW's group relative to Muon's, >= 0. Both follow one schedule.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        kind = type(given).__name__
        raise TypeError(f"model must be a Module, got a {kind}: write muon_groups(model)")
    check.boolean("conv", conv)
    embeddings = [m for m in model.modules() if isinstance(m, _EMBEDDINGS)]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    apart = {id(p) for m in [*embeddings, *linear[-1:]] for p in m.parameters()}
    groups: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, p in named_parameters(model):
        groups[id(p) not in apart].append((name, p))
    shared = {"conv": conv, "adam_lr_scale": check.real("adam_lr_scale", adam_lr_scale, at_least=0)}
    return [{"params": pairs, "muon": muon, **shared} for muon, pairs in groups.items() if pairs]


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _is_of_muon(param: Tensor, group: Mapping[str, Any]) -> bool:
    # states saved before 0.3 have no `conv`
    fits = param.ndim == 2 or (param.ndim > 2 and group.get("conv", False))
    return bool(group["muon"]) and fits and not param.is_complex()
