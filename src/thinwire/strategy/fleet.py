"""Reads a Paddle fleet description as a strategy. Every attribute is mapped, refused or noted.

Names and defaults are those of fleet's own descriptions.

Source: PaddlePaddle, distributed_strategy.proto and distributed_strategy.py, 2020 to 2023.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from glob import escape
from typing import Any, NamedTuple

from thinwire import _validate as check
from thinwire._wording import closest_or_all, plain, warn_user
from thinwire.compress.dgc import DGC
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.optim.layerwise import LAMB, LARS
from thinwire.pipeline.split import Pipeline
from thinwire.step.config import AMP, GradientMerge, Recompute
from thinwire.strategy.documents import F

Keys = Mapping[str, Any]


class _Key(NamedTuple):
    """A key of one of fleet's configs; a tuple as default stands for a list."""

    default: Any = None
    refused: str = ""
    """Reason why the key must keep its default."""
    noted: str = ""
    """Reason why the key has no counterpart; reported if its value differs from the default."""


def _amp(keys: Keys) -> AMP:
    scale: LossScale = FixedLossScale(keys["init_loss_scaling"])
    if check.boolean("use_dynamic_loss_scaling", keys["use_dynamic_loss_scaling"]):
        scale = DynamicLossScale(
            keys["init_loss_scaling"], keys["incr_ratio"], keys["incr_every_n_steps"]
        )
    return AMP("float16", scale)


def _pipeline(keys: Keys) -> Pipeline:
    counts = [keys[key] for key in ("micro_batch", "accumulate_steps") if keys[key] != 1]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(
            f"micro_batch={counts[0]!r} and accumulate_steps={counts[1]!r} are two names for the "
            "number of parts of a batch: set one of them"
        )
    schedules = {"1F1B": "1f1b", "F-then-B": "gpipe"}
    check.one_of("schedule_mode", keys["schedule_mode"], schedules)
    stages = keys["pp_degree"]
    if stages <= 1:
        stages = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Pipeline(stages, [*counts, 1][0], schedules[keys["schedule_mode"]])


def _recompute(keys: Keys) -> Recompute:
    if not keys["checkpoints"]:
        raise ValueError(
            "checkpoints is empty, which turns recompute off in fleet: name modules, or set "
            "recompute to False"
        )
    return Recompute(_words("checkpoints", keys["checkpoints"]))


def _dgc(keys: Keys) -> DGC:
    sparsity = check.entries("sparsity", keys["sparsity"], "numbers") or [0.999]
    return DGC(keys["rampup_begin_step"], keys["rampup_step"], tuple(sparsity))


def _excluded(keys: Keys, pattern: str) -> tuple[str, ...]:
    name = "exclude_from_weight_decay"
    return tuple(pattern.format(escape(word)) for word in _words(name, keys[name]))


_AUTOCAST = "autocast decides per operation; use torch.autocast(enabled=False) in the model"
_AVERAGED = "gradients are averaged over ranks; multiply the loss instead"
_GROWTH = "here every overflow divides by the growth factor"
_UNSPLIT = "tensors are not split over ranks"
_SHARDED = (
    "a description cannot shard optimizer state and parameters: call fully_shard, and pass mesh= "
    "to prepare"
)
_FEATURES: dict[str, tuple[Callable[[Keys], Any], str, dict[str, _Key]]] = {
    "amp": (
        _amp,
        "every overflow divides the loss scale by the growth factor",
        {
            "init_loss_scaling": _Key(32768.0),
            "incr_every_n_steps": _Key(1000),
            "incr_ratio": _Key(2.0),
            "use_dynamic_loss_scaling": _Key(True),
            "decr_every_n_nan_or_inf": _Key(2, noted=_GROWTH),
            "decr_ratio": _Key(0.8, noted=_GROWTH),
            "custom_white_list": _Key((), _AUTOCAST),
            "custom_black_list": _Key((), _AUTOCAST),
            "custom_black_varnames": _Key((), _AUTOCAST),
            "use_pure_fp16": _Key(False, "convert the model's dtype yourself"),
            "use_fp16_guard": _Key(True, noted="autocast decides per operation"),
        },
    ),
    "recompute": (
        _recompute,
        "checkpoints are names of tensors in fleet, and patterns over module names here",
        {
            "checkpoints": _Key(()),
            "enable_offload": _Key(False, "checkpoints are not moved to the host"),
            "checkpoint_shape": _Key((), noted="shapes are taken from the tensors"),
        },
    ),
    "pipeline": (
        _pipeline,
        "stages are hybrid_configs.pp_degree, else the ranks of this machine; set split_points if "
        "the model is not sequential (device_guard)",
        {
            "micro_batch": _Key(1),
            "accumulate_steps": _Key(1),
            "micro_batch_size": _Key(1, noted="follows from the batch and micro_batches"),
            "schedule_mode": _Key("1F1B"),
            "p2p_cache_shape": _Key(True, noted="stages agree on shapes once"),
        },
    ),
    "gradient_merge": (
        lambda keys: GradientMerge(**keys),
        "",
        {"k_steps": _Key(1), "avg": _Key(True)},
    ),
    "dgc": (
        _dgc,
        "a sent value costs one bit here; DGC(value_bits=32) sends exact values",
        {"rampup_begin_step": _Key(0), "rampup_step": _Key(1), "sparsity": _Key(())},
    ),
    "lars": (
        lambda keys: LARS(**{**keys, "exclude_from_weight_decay": _excluded(keys, "*{}*")}),
        "",
        {
            "lars_coeff": _Key(0.001),
            "lars_weight_decay": _Key(0.0005),
            "epsilon": _Key(0.0),
            "exclude_from_weight_decay": _Key(()),
        },
    ),
    "lamb": (
        lambda keys: LAMB(keys["lamb_weight_decay"], _excluded(keys, "*{}")),
        "eps is Lamb's default 1e-6; fleet uses the eps of the inner optimizer",
        {"lamb_weight_decay": _Key(0.01), "exclude_from_weight_decay": _Key(())},
    ),
    "localsgd": (lambda keys: LocalSGD(**keys), "", {"k_steps": _Key(1), "begin_step": _Key(1)}),
    "adaptive_localsgd": (
        lambda keys: AdaptiveLocalSGD(keys["init_k_steps"], begin_step=keys["begin_step"]),
        "init_k_steps is outside the square root of the interval's formula, as in the paper; in "
        "fleet it is inside",
        {"init_k_steps": _Key(1), "begin_step": _Key(1)},
    ),
}
"""By feature: its config here, what differs, and fleet's keys."""

_CONFIGS = {
    **{f"{name}_configs": keys for name, (_, _, keys) in _FEATURES.items()},
    "hybrid_configs": {
        "dp_degree": _Key(-1),
        "pp_degree": _Key(1),
        "mp_degree": _Key(1, _UNSPLIT),
        "sharding_degree": _Key(1, _SHARDED),
    },
    "gradient_scale_configs": {
        "scale_strategy": _Key("avg", _AVERAGED),
        "scale_gradient": _Key(False, _AVERAGED),
    },
}
_REFUSED = {
    "sharding": _SHARDED,
    "tensor_parallel": _UNSPLIT,
    "fp16_allreduce": "gradients are exchanged in their own dtype; dgc with value_bits=16 sends "
    "fewer bytes",
    "asp": "structured sparsity of weights is not supported",
    "sync_batch_norm": "convert the model with torch.nn.SyncBatchNorm before prepare",
    **dict.fromkeys(("auto", "semi_auto", "auto_search"), "name the features you want"),
}
"""Flags that must stay off, with the reason."""

_NOTED = (
    "elastic sync_nccl_allreduce nccl_comm_num use_hierarchical_allreduce "
    "hierarchical_allreduce_inter_nranks fuse_all_reduce_ops fuse_grad_size_in_MB "
    "fuse_grad_size_in_TFLOPS _fuse_grad_size_in_TFLOPS fuse_grad_size_in_num fuse_grad_merge "
    "last_comm_group_size_MB find_unused_parameters without_graph_optimization "
    "calc_comm_same_stream _calc_comm_same_stream build_strategy execution_strategy "
    "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent "
    "adam_d2sum heter_ccl_mode trainer_desc_configs downpour_table_param fs_client_param"
)
"""Attributes without counterpart, whatever their value."""
_THEIR_NAMES = {
    "init_loss_scale": "init_loss_scaling",
    "loss_scale": "init_loss_scaling",
    "scale_factor": "incr_ratio",
    "scale_window": "incr_every_n_steps",
    "micro_batches": "micro_batch (accumulate_steps)",
}
"""Fleet's names of arguments that are named otherwise here."""


def from_fleet(kind: type[F], description: Mapping[str, Any]) -> F:
    """See `DistributedStrategy.from_fleet`."""
    given = _mapping("description", description)
    wrong: list[Exception] = []
    noted = _NOTED.split()
    notes: list[str] = []
    unread = ("a_sync", "a_sync_configs", "sharding_configs", "tensor_parallel_configs", "mode")
    _require_known("", given, (*_FEATURES, *_CONFIGS, *_REFUSED, *noted, *unread), wrong)
    on = {name for name in (*_FEATURES, *_REFUSED, "a_sync") if _flag(name, given, wrong)}
    wrong += [_refused(f"{name}=True", _REFUSED[name]) for name in _REFUSED if name in on]
    a_sync = given.get("a_sync_configs") or {}
    if "a_sync" in on and a_sync.get("k_steps") != -1:
        wrong.append(_refused("a_sync=True", "no parameter servers; use localsgd instead"))
    if given.get("mode") not in (1, "COLLECTIVE", "collective", None):
        wrong.append(_refused(f"mode={given['mode']!r}", "only COLLECTIVE training is supported"))
    if without := [name for name in noted if name in given]:
        notes.append(f"{', '.join(without)}: without effect here")
    configs = {name: _config(name, given, on, wrong, notes) for name in _CONFIGS}
    pp_degree = configs["hybrid_configs"]["pp_degree"]
    configs["pipeline_configs"]["pp_degree"] = pp_degree
    if "pipeline" not in on and pp_degree != 1:
        wrong.append(_refused(f"hybrid_configs.pp_degree={pp_degree!r}", "without pipeline=True"))
    fields = {}
    for name, (make, note, _) in _FEATURES.items():
        if name not in on:
            continue
        notes += [f"{name}: {note}"] if note else []
        try:
            fields[name] = make(configs[f"{name}_configs"])
        except (TypeError, ValueError) as error:
            text = re.sub(r"^\w+", lambda word: _THEIR_NAMES.get(word[0], word[0]), str(error))
            wrong.append(type(error)(f"{name}_configs.{text}"))
    try:
        strategy = kind(**fields)
    except StrategyError as error:
        wrong.append(error)
    if wrong:
        family = (
            TypeError if any(isinstance(error, TypeError) for error in wrong) else StrategyError
        )
        raise family(f"fleet description: {'; '.join(map(str, wrong))}")
    # a claim about the ranks, not a setting: only `prepare` can check it; it is not in `to_dict`
    if (replicas := configs["hybrid_configs"]["dp_degree"]) != -1:
        object.__setattr__(strategy, "expected_replicas", replicas)
    if notes:
        warn_user("from_fleet: " + "; ".join(notes))
    return strategy


def _config(
    name: str, given: Keys, on: Collection[str], wrong: list[Exception], notes: list[str]
) -> dict[str, Any]:
    """Return fleet's config with its defaults; keys of a feature that is off are not judged."""
    known = _CONFIGS[name]
    feature = name.removesuffix("_configs")
    values = {key: entry.default for key, entry in known.items()}
    try:
        keys = _mapping(name, {} if given.get(name) is None else given[name])
    except TypeError as error:
        wrong.append(error)
        return values
    _require_known(f"{name}.", keys, known, wrong)
    if feature in _FEATURES and feature not in on:
        notes += [f"{name}: without effect, because the flag of the feature is off"] if keys else []
        return values
    for key, (default, refused, noted) in known.items():
        value = keys.get(key)
        if value is None or value == default or (default == () and not value):
            continue
        if name == "hybrid_configs" and type(value) is not int:
            wrong.append(TypeError(f"{name}.{key} must be an integer, got {value!r}"))
        elif refused:
            wrong.append(_refused(f"{name}.{key}={value!r}", refused))
        else:
            values[key] = value
            notes += [f"{name}.{key}={value!r}: {noted}"] if noted else []
    return values


def _refused(setting: str, reason: str) -> StrategyError:
    return StrategyError(f"{setting} cannot be carried over: {reason}")


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{name} must be a mapping, got {value!r} of type {type(value).__name__}")


def _require_known(
    prefix: str, given: Mapping[Any, Any], known: Collection[str], wrong: list[Exception]
) -> None:
    for key, value in given.items():
        if key not in known:
            hint = closest_or_all(key, sorted(known))
            wrong.append(StrategyError(f"{plain(f'{prefix}{key}')}={value!r} is unknown{hint}"))


def _flag(name: str, given: Keys, wrong: list[Exception]) -> bool:
    try:
        return check.boolean(name, given.get(name, False))
    except TypeError as error:
        wrong.append(error)
        return False


def _words(name: str, value: Any) -> tuple[str, ...]:
    return check.words(name, check.entries(name, value, "strings"))
