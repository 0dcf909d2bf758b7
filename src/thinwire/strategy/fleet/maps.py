"""Converts each feature of a Paddle fleet description to a thinwire config."""

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

Keys = Mapping[str, Any]


@dataclass
class Findings:
    """Findings about a description, collected before any is reported."""

    wrong_types: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def mapped(name: str, given: Keys, defaults: Keys, findings: Findings) -> Any:
    """Return the thinwire config of one feature; None if `findings` got a reason per wrong key."""
    left = dict(given)
    while True:
        notes: list[str] = []
        try:
            config = MAPS[name]({**defaults, **left}, notes)
        except (TypeError, ValueError) as error:
            words = _in_fleet_terms(name, error)
            target = findings.wrong_types if isinstance(error, TypeError) else findings.problems
            target.append(f"{name}_configs.{words}")
            key = re.match(r"\w*", words)
            if key is None or left.pop(key[0], None) is None:
                return None
        else:
            findings.notes += notes
            return config if left == given else None


def _amp(keys: Keys, notes: list[str]) -> AMP:
    scale: LossScale = FixedLossScale(keys["init_loss_scaling"])
    if check.boolean("use_dynamic_loss_scaling", keys["use_dynamic_loss_scaling"]):
        scale = DynamicLossScale(
            keys["init_loss_scaling"], keys["incr_ratio"], keys["incr_every_n_steps"]
        )
        if (keys["decr_every_n_nan_or_inf"], keys["decr_ratio"]) == (2, 0.8):
            notes.append("amp: here every overflow divides the loss scale by the growth factor")
    return AMP("float16", scale)


def _recompute(keys: Keys, notes: list[str]) -> Recompute:
    names = _words("checkpoints", keys["checkpoints"])
    if not names:
        raise ValueError(
            "checkpoints is empty, which turns recompute off in fleet: name modules, or set "
            "recompute to False"
        )
    notes.append(
        f"recompute_configs.checkpoints={list(names)}: names of tensors in fleet, read as patterns "
        "over module names"
    )
    return Recompute(names)


def _pipeline(keys: Keys, notes: list[str]) -> Pipeline:
    counts = [keys[key] for key in ("micro_batch", "accumulate_steps") if keys[key] != 1]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(
            f"micro_batch={counts[0]!r} and accumulate_steps={counts[1]!r} are two names for the "
            "number of parts of a batch: set one of them"
        )
    schedules = {"1F1B": "1f1b", "F-then-B": "gpipe"}
    check.one_of("schedule_mode", keys["schedule_mode"], schedules)
    stages, source = keys["pp_degree"], "hybrid_configs.pp_degree"
    if stages <= 1:
        stages = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        source = "the ranks of this machine"
    notes.append(
        f"pipeline: {stages} stages, from {source}; the description has no split points "
        "(device_guard): set split_points if the model is not sequential"
    )
    return Pipeline(stages, [*counts, 1][0], schedules[keys["schedule_mode"]])


def _dgc(keys: Keys, notes: list[str]) -> DGC:
    notes.append("dgc: a sent value costs one bit here; DGC(value_bits=32) sends exact values")
    return DGC(
        keys["rampup_begin_step"],
        keys["rampup_step"],
        _listed("sparsity", keys["sparsity"]) or (0.999,),
    )


def _lars(keys: Keys, notes: list[str]) -> LARS:
    excluded = _words("exclude_from_weight_decay", keys["exclude_from_weight_decay"])
    patterns = tuple(f"*{escape(word)}*" for word in excluded)
    return LARS(keys["lars_coeff"], keys["lars_weight_decay"], keys["epsilon"], patterns)


def _lamb(keys: Keys, notes: list[str]) -> LAMB:
    excluded = _words("exclude_from_weight_decay", keys["exclude_from_weight_decay"])
    notes.append("lamb: eps is Lamb's default 1e-6; fleet uses the eps of the inner optimizer")
    return LAMB(keys["lamb_weight_decay"], tuple(f"*{escape(word)}" for word in excluded))


def _adaptive_localsgd(keys: Keys, notes: list[str]) -> AdaptiveLocalSGD:
    config = AdaptiveLocalSGD(keys["init_k_steps"], begin_step=keys["begin_step"])
    if config.init_k_steps > 1:
        notes.append(
            f"adaptive_localsgd: init_k_steps={config.init_k_steps} is outside the square root of "
            "the interval's formula, as in the paper; in fleet it is inside"
        )
    return config


MAPS: dict[str, Callable[[Keys, list[str]], Any]] = {
    "amp": _amp,
    "recompute": _recompute,
    "pipeline": _pipeline,
    "gradient_merge": lambda keys, _: GradientMerge(**keys),
    "dgc": _dgc,
    "lars": _lars,
    "lamb": _lamb,
    "localsgd": lambda keys, _: LocalSGD(**keys),
    "adaptive_localsgd": _adaptive_localsgd,
}
"""Functions from each feature's fleet config to a thinwire config."""

_THEIR_NAMES = {
    "amp": {
        "init_loss_scale": "init_loss_scaling",
        "loss_scale": "init_loss_scaling",
        "scale_factor": "incr_ratio",
        "scale_window": "incr_every_n_steps",
    },
    "pipeline": {"micro_batches": "micro_batch (accumulate_steps)"},
}


def _in_fleet_terms(name: str, error: Exception) -> str:
    """Replace the argument's name at the start of a message by fleet's name of it."""
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
