"""What becomes of each attribute of a Paddle fleet description: it maps, is refused, or is noted.

Names and defaults are those of the fields that fleet's own descriptions have.

Source: PaddlePaddle, distributed_strategy.proto and distributed_strategy.py, 2020 to 2023.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from glob import escape
from typing import Any

from thinwire import _validate as check
from thinwire.compress.dgc import DGC
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.optim.config import LAMB, LARS
from thinwire.pipeline.config import Pipeline
from thinwire.step.config import AMP, GradientMerge, Recompute

__all__ = [
    "CONFIG_KEYS",
    "MAPS",
    "NOTED",
    "NOTED_FLAGS",
    "NOTED_KEYS",
    "REFUSED",
    "REFUSED_KEYS",
    "Findings",
    "mapped",
]

Keys = Mapping[str, Any]


@dataclass
class Findings:
    """What is to be said of a description, collected before anything is said."""

    wrong_types: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Feature:
    """One feature's configs, with fleet's defaults where nothing was given."""

    keys: Keys
    given: frozenset[str]
    hybrid: Keys
    findings: Findings


def mapped(name: str, given: Keys, defaults: Keys, hybrid: Keys, findings: Findings) -> Any:
    """Our config of one feature that is on, or None after findings said why there is none: one for
    each wrong key.
    """
    left = dict(given)
    while True:
        attempt = Findings()
        try:
            config = MAPS[name](_Feature({**defaults, **left}, frozenset(left), hybrid, attempt))
        except (TypeError, ValueError) as error:
            words = _their_words(name, error)
            said = findings.wrong_types if isinstance(error, TypeError) else findings.problems
            said.append(f"{name}_configs.{words}")
            key = re.match(r"\w*", words)
            if key is None or left.pop(key[0], None) is None:
                return None
        else:
            findings.notes += attempt.notes
            return config if left == given else None


def _amp(feature: _Feature) -> AMP:
    keys = feature.keys
    scale: LossScale = FixedLossScale(keys["init_loss_scaling"])
    if check.boolean("use_dynamic_loss_scaling", keys["use_dynamic_loss_scaling"]):
        scale = DynamicLossScale(
            keys["init_loss_scaling"], keys["incr_ratio"], keys["incr_every_n_steps"]
        )
        if not feature.given & {"decr_every_n_nan_or_inf", "decr_ratio"}:
            feature.findings.notes.append(
                "amp: here every overflow divides the loss scale by the growth factor"
            )
    return AMP("float16", scale)


def _recompute(feature: _Feature) -> Recompute:
    names = _words("checkpoints", feature.keys["checkpoints"])
    if not names:
        raise ValueError(
            "checkpoints is empty, which means off in fleet: name modules, or set recompute to "
            "False"
        )
    feature.findings.notes.append(
        f"recompute_configs.checkpoints={list(names)}: names of tensors in fleet, read as patterns "
        "over module names"
    )
    return Recompute(names)


def _pipeline(feature: _Feature) -> Pipeline:
    keys, counts = feature.keys, feature.given & {"micro_batch", "accumulate_steps"}
    if len(counts) == 2 and keys["micro_batch"] != keys["accumulate_steps"]:
        raise ValueError(
            f"micro_batch={keys['micro_batch']!r} and "
            f"accumulate_steps={keys['accumulate_steps']!r} are two names of one number, how many "
            "parts a batch is cut into: give one of them"
        )
    schedules = {"1F1B": "1f1b", "F-then-B": "gpipe"}
    check.one_of("schedule_mode", keys["schedule_mode"], schedules)
    stages, source = _stages(feature.hybrid)
    feature.findings.notes.append(
        f"pipeline: {stages} stages, from {source}; where the model is cut (device_guard) is no "
        "part of the description: set split_points if the model is not sequential"
    )
    return Pipeline(
        stages, keys[next(iter(counts), "micro_batch")], schedules[keys["schedule_mode"]]
    )


def _stages(hybrid: Keys) -> tuple[int, str]:
    if hybrid["pp_degree"] > 1:
        return hybrid["pp_degree"], "hybrid_configs.pp_degree"
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "the ranks of this machine"


def _gradient_merge(feature: _Feature) -> GradientMerge:
    return GradientMerge(feature.keys["k_steps"], feature.keys["avg"])


def _dgc(feature: _Feature) -> DGC:
    keys = feature.keys
    feature.findings.notes.append(
        "dgc: a sent value costs one bit here; DGC(value_bits=32) sends exact values"
    )
    return DGC(
        keys["rampup_begin_step"],
        keys["rampup_step"],
        _listed("sparsity", keys["sparsity"]) or (0.999,),
    )


def _lars(feature: _Feature) -> LARS:
    keys = feature.keys
    excluded = _words("exclude_from_weight_decay", keys["exclude_from_weight_decay"])
    patterns = tuple(f"*{escape(word)}*" for word in excluded)
    return LARS(keys["lars_coeff"], keys["lars_weight_decay"], keys["epsilon"], patterns)


def _lamb(feature: _Feature) -> LAMB:
    excluded = _words("exclude_from_weight_decay", feature.keys["exclude_from_weight_decay"])
    feature.findings.notes.append(
        "lamb: eps is Lamb's own 1e-6; fleet takes that of the optimizer inside"
    )
    return LAMB(feature.keys["lamb_weight_decay"], tuple(f"*{escape(word)}" for word in excluded))


def _localsgd(feature: _Feature) -> LocalSGD:
    return LocalSGD(feature.keys["k_steps"], begin_step=feature.keys["begin_step"])


def _adaptive_localsgd(feature: _Feature) -> AdaptiveLocalSGD:
    config = AdaptiveLocalSGD(feature.keys["init_k_steps"], begin_step=feature.keys["begin_step"])
    if config.init_k_steps > 1:
        feature.findings.notes.append(
            f"adaptive_localsgd: init_k_steps={config.init_k_steps} stands outside the root of the "
            "interval's formula, as in the paper; fleet has it inside"
        )
    return config


MAPS: dict[str, Callable[[_Feature], Any]] = {
    "amp": _amp,
    "recompute": _recompute,
    "pipeline": _pipeline,
    "gradient_merge": _gradient_merge,
    "dgc": _dgc,
    "lars": _lars,
    "lamb": _lamb,
    "localsgd": _localsgd,
    "adaptive_localsgd": _adaptive_localsgd,
}
"""Our config from each feature's configs."""

_THEIR_NAMES = {
    "amp": {
        "init_loss_scale": "init_loss_scaling",
        "loss_scale": "init_loss_scaling",
        "scale_factor": "incr_ratio",
        "scale_window": "incr_every_n_steps",
    },
    "pipeline": {"micro_batches": "micro_batch (accumulate_steps)"},
}


def _their_words(name: str, error: Exception) -> str:
    """A message of ours, which begins with the argument's name, with fleet's name of it."""
    names = _THEIR_NAMES.get(name, {})
    return re.sub(r"^\w+", lambda word: names.get(word[0], word[0]), str(error))


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list, got {value!r} of type {type(value).__name__}")
    return tuple(value)


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = _listed(name, value)
    for i, word in enumerate(words):
        check.instance(f"{name}[{i}]", word, str)
    return words


CONFIG_KEYS: dict[str, dict[str, Any]] = {
    "amp_configs": {
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "incr_ratio": 2.0,
        "use_dynamic_loss_scaling": True,
        "decr_every_n_nan_or_inf": 2,
        "decr_ratio": 0.8,
        "custom_white_list": (),
        "custom_black_list": (),
        "custom_black_varnames": (),
        "use_pure_fp16": False,
        "use_fp16_guard": True,
    },
    "recompute_configs": {"checkpoints": (), "enable_offload": False, "checkpoint_shape": ()},
    "pipeline_configs": {
        "micro_batch": 1,
        "accumulate_steps": 1,
        "micro_batch_size": 1,
        "schedule_mode": "1F1B",
        "p2p_cache_shape": True,
    },
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
    "dgc_configs": {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": ()},
    "lars_configs": {
        "lars_coeff": 0.001,
        "lars_weight_decay": 0.0005,
        "epsilon": 0.0,
        "exclude_from_weight_decay": (),
    },
    "lamb_configs": {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": ()},
    "localsgd_configs": {"k_steps": 1, "begin_step": 1},
    "adaptive_localsgd_configs": {"init_k_steps": 1, "begin_step": 1},
    "hybrid_configs": {"dp_degree": -1, "pp_degree": 1, "mp_degree": 1, "sharding_degree": 1},
    "gradient_scale_configs": {"scale_strategy": "avg", "scale_gradient": False},
    "a_sync_configs": {
        "k_steps": -1,
        "max_merge_var_num": 1,
        "send_queue_size": 16,
        "independent_recv_thread": False,
        "min_send_grad_num_before_recv": 1,
        "thread_pool_size": 1,
        "send_wait_times": 1,
        "runtime_split_send_recv": False,
        "launch_barrier": True,
        "heter_worker_device_guard": "cpu",
        "lr_decay_steps": 10,
        "use_ps_gpu": 0,
    },
}
"""The keys of the configs that are read, with fleet's defaults; tuples stand for lists."""

_NAME_FEATURES = "name the features you want"
_SHARDED = (
    "optimizer state and parameters are not sharded from a description: call fully_shard, and give "
    "prepare its mesh="
)
REFUSED: dict[str, tuple[Any, str]] = {
    "sharding": (False, _SHARDED),
    "tensor_parallel": (False, "tensors are not split over ranks"),
    "fp16_allreduce": (
        False,
        "gradients are exchanged in their own dtype; dgc with value_bits=16 sends fewer bytes",
    ),
    "asp": (False, "structured sparsity of weights is not offered"),
    "sync_batch_norm": (False, "convert the model with torch.nn.SyncBatchNorm before prepare"),
    "auto": (False, _NAME_FEATURES),
    "semi_auto": (False, _NAME_FEATURES),
    "auto_search": (False, _NAME_FEATURES),
}
"""Flags that must keep their default, with the reason."""

_AUTOCAST = "autocast decides per operation; use torch.autocast(enabled=False) in the model"
_AVERAGED = "gradients are averaged over ranks; multiply the loss instead"
REFUSED_KEYS: dict[tuple[str, str], str] = {
    ("recompute_configs", "enable_offload"): "checkpoints are not moved to the host",
    ("amp_configs", "custom_white_list"): _AUTOCAST,
    ("amp_configs", "custom_black_list"): _AUTOCAST,
    ("amp_configs", "custom_black_varnames"): _AUTOCAST,
    ("amp_configs", "use_pure_fp16"): "convert the model's dtype yourself",
    ("hybrid_configs", "mp_degree"): "tensors are not split over ranks",
    ("hybrid_configs", "sharding_degree"): _SHARDED,
    ("gradient_scale_configs", "scale_strategy"): _AVERAGED,
    ("gradient_scale_configs", "scale_gradient"): _AVERAGED,
}
"""Keys of configs that must keep their default, with the reason."""

_TRANSPORT = "torch.distributed decides, with the same result"
_BUCKETS = "buckets are chosen here"
_NO_GRAPH = "there is no graph of operators"
_CUDNN = "set torch.backends.cudnn instead"
_SERVERS = "of the parameter-server back-end only"
NOTED: dict[str, str] = {
    "elastic": "has no effect in fleet either; to resume on another number of ranks is engine.load",
    "sync_nccl_allreduce": _TRANSPORT,
    "nccl_comm_num": _TRANSPORT,
    "use_hierarchical_allreduce": _TRANSPORT,
    "hierarchical_allreduce_inter_nranks": _TRANSPORT,
    "fuse_all_reduce_ops": _BUCKETS,
    "fuse_grad_size_in_MB": _BUCKETS,
    "fuse_grad_size_in_TFLOPS": _BUCKETS,
    "_fuse_grad_size_in_TFLOPS": _BUCKETS,
    "fuse_grad_size_in_num": _BUCKETS,
    "fuse_grad_merge": _BUCKETS,
    "last_comm_group_size_MB": _BUCKETS,
    "find_unused_parameters": "a parameter without gradient is left alone if it has none on any "
    "rank, and is an error on all ranks if it has one on some",
    "without_graph_optimization": _NO_GRAPH,
    "calc_comm_same_stream": _NO_GRAPH,
    "_calc_comm_same_stream": _NO_GRAPH,
    "build_strategy": _NO_GRAPH,
    "execution_strategy": _NO_GRAPH,
    "cudnn_exhaustive_search": _CUDNN,
    "conv_workspace_size_limit": _CUDNN,
    "cudnn_batchnorm_spatial_persistent": _CUDNN,
    "adam_d2sum": _SERVERS,
    "heter_ccl_mode": _SERVERS,
    "trainer_desc_configs": _SERVERS,
    "downpour_table_param": _SERVERS,
    "fs_client_param": _SERVERS,
}
"""Attributes without counterpart, whatever their value, with the reason."""

NOTED_FLAGS = (
    "elastic",
    "sync_nccl_allreduce",
    "use_hierarchical_allreduce",
    "fuse_all_reduce_ops",
    "fuse_grad_merge",
    "find_unused_parameters",
    "without_graph_optimization",
    "calc_comm_same_stream",
    "_calc_comm_same_stream",
    "cudnn_exhaustive_search",
    "cudnn_batchnorm_spatial_persistent",
    "adam_d2sum",
)
"""Those of them that are True or False in fleet."""

NOTED_KEYS: dict[tuple[str, str], str] = {
    ("recompute_configs", "checkpoint_shape"): "shapes are taken from the tensors",
    (
        "pipeline_configs",
        "micro_batch_size",
    ): "follows from the size of the batch and micro_batches",
    ("pipeline_configs", "p2p_cache_shape"): "shapes are agreed on by torch.distributed.pipelining",
    ("amp_configs", "decr_every_n_nan_or_inf"): "here every overflow divides by the growth factor",
    ("amp_configs", "decr_ratio"): "here every overflow divides by the growth factor",
    ("amp_configs", "use_fp16_guard"): "autocast decides per operation, there is no guarded region",
}
"""Keys of configs without counterpart, where they differ from their default, with the reason."""
