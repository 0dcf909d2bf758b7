"""Strategies by name. Torch is not imported here, so that bad names are refused early."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from thinwire._wording import closest
from thinwire.tools.run.config import Recipe

if TYPE_CHECKING:
    from thinwire.strategy.distributed_strategy import DistributedStrategy

USUAL = ("dense", "quantized-local", "muon-local")
"""Strategies that are compared by default."""

# Those of dense and of the local strategies. LAMB and LARS scale their updates by the parameters;
# theirs are the best of 0.01, 0.03 and 0.1, and of 1, 2 and 4, in 60 steps of the tiny model: a
# place to start from.
_RATES = {"adamw": 0.006, "muon": 0.012, "sgd": 0.1}
_LARS_RATES, _LAMB_RATES = dict.fromkeys(_RATES, 4.0), dict.fromkeys(_RATES, 0.03)


def choose(words: Iterable[str]) -> tuple[Recipe, ...]:
    """Return the strategies for names or files; raise ValueError for the first wrong one."""
    chosen: dict[str, Recipe] = {}
    for word in words:
        is_file = Path(word).suffix.lower() in (".yaml", ".yml")
        recipe = _recipe_of_file(word) if is_file else _by_name(word)
        if recipe.name in chosen:
            raise ValueError(
                f"strategies={word!r}: {recipe.name!r} is given twice; name each strategy once "
                "and give files different names"
            )
        chosen[recipe.name] = recipe
    if not chosen:
        raise ValueError(
            f"strategies is empty; choose from {', '.join(STRATEGIES)}, or name a strategy file"
        )
    return tuple(chosen.values())


def _by_name(word: str) -> Recipe:
    if word in STRATEGIES:
        return STRATEGIES[word]
    raise ValueError(
        f"strategies={word!r} is unknown{closest(word, STRATEGIES)}; choose from "
        f"{', '.join(STRATEGIES)}, or name a strategy file (.yaml)"
    )


def _recipe_of_file(word: str) -> Recipe:
    """Return the strategy in a file, called by its stem, or its file name if the stem is taken."""
    from thinwire.strategy.distributed_strategy import DistributedStrategy

    try:
        strategy = DistributedStrategy.load(word)
    except OSError as error:
        raise ValueError(
            f"strategies={word!r} cannot be read: {error.strerror or error}; give an existing file"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategies={word!r}: {error}") from error
    if strategy.pipeline is not None:
        raise ValueError(
            f"strategies={word!r} has a pipeline, but every worker of a comparison trains a "
            "whole model; remove pipeline"
        )
    path = Path(word)
    return Recipe(
        path.name if path.stem in STRATEGIES else path.stem,
        f"strategy file {path.name}: {', '.join(strategy.on) or 'no field set'}",
        _PREPARED,
        _rates(strategy),
        _OWN,
        {"document": strategy.to_dict()},
        file=word,
    )


def compression_of(strategy: "DistributedStrategy") -> Any:
    """Return the config that compresses gradients, or changes of local updates; or None."""
    return strategy.gradient_compression or getattr(strategy.local, "compression", None)


_NEAREST = {"DGC": "dgc", "LowRank": "low-rank", "Sparse": "sparse-local"}
"""Built-in strategies by the class of their compression."""


def _rates(strategy: "DistributedStrategy") -> Mapping[str, float]:
    """Return the rates of the built-in strategy that sends the same data, or those of dense; but
    for LAMB and LARS.
    """
    if strategy.lamb is not None:
        return _LAMB_RATES
    if strategy.lars is not None:
        return _LARS_RATES
    compression = compression_of(strategy)
    kind = type(compression).__name__
    if kind == "Quantized":
        return STRATEGIES["muon-local" if compression.value_bits == 1 else "quantized-local"].rates
    return STRATEGIES[_NEAREST.get(kind, "dense")].rates


_RING = "formula of a ring all-reduce, 2(W-1)/W times the message"
_OWN = "the messages of this library, counted once per receiver"
_TRAINERS = "thinwire.tools.run.trainers"
_PREPARED = f"{_TRAINERS}:Prepared"
_FP16_CODE = """\
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
"""
_POWERSGD_CODE = """\
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

# with two buckets the hook never returns on gloo
ddp = DistributedDataParallel(model, bucket_cap_mb=10_000)
state = powersgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5)
ddp.register_comm_hook(state, powersgd.powerSGD_hook)
"""
_CODE = {"fp16": _FP16_CODE, "powersgd": _POWERSGD_CODE}


def _ddp(name: str, summary: str, hook: str = "", sgd: float = 0.1) -> Recipe:
    """Return a recipe for DDP, plain or with one of torch's hooks; with Muon if so named."""
    return Recipe(
        name,
        summary,
        f"{_TRAINERS}:DDPTrainer",
        {**_RATES, "sgd": sgd},
        _RING,
        hook=hook,
        code=_CODE.get(hook),
        optimizer="muon" if name.endswith("-muon") else None,
    )


def _own(
    name: str,
    summary: str,
    options: Mapping[str, Any],
    field: str | None = "localsgd",
    *,
    ramp: str | None = None,
    optimizer: str | None = None,
    **rates: float,
) -> Recipe:
    """Return a recipe for `field` of a strategy file; its rates default to those of dense."""
    every = {**_RATES, **rates}
    return Recipe(name, summary, _PREPARED, every, _OWN, options, field, ramp, optimizer=optimizer)


# tuned at about 90 averagings, where momentum 0.9 and 0.6 lose (research/README.md)
_OUTER = {"outer_lr": 0.7, "outer_momentum": 0.3, "outer_nesterov": True}
_RAMP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
# Of AdamW the rates are the best of 0.003, 0.006 and 0.012 in 100 steps of the small model on the
# validation part, one seed (`--link loopback --tune --size small --steps 100 --lr`).
# Of SGD the rates of fp16, powersgd and dgc are the better of 0.07 and 0.15, at as many steps as 90
# s over 100 Mbit/s allow. Those of dense and of the local ones were chosen at what 20 Mbit/s
# allows.
_RECIPES = (
    _ddp("dense", "DDP, every gradient in float32"),
    _ddp("dense-muon", "DDP, every gradient in float32, with Muon for the hidden matrices"),
    _ddp("fp16", "DDP with torch's hook, gradients in float16", "fp16", sgd=0.07),
    _ddp("fp16-muon", "torch's hook, float16, with Muon for the hidden matrices", "fp16"),
    _ddp("powersgd", "DDP with torch's PowerSGD hook, rank 2", "powersgd", sgd=0.15),
    _own(
        "dgc",
        "deep gradient compression, 0.1 % of the entries at one bit",
        {"sparsity": [*_RAMP], "value_bits": 1},
        "dgc",
        ramp="rampup_step",
        sgd=0.15,
    ),
    _own(
        "low-rank",
        "gradients as two factors of 2 columns (PowerSGD), in buckets that are sent early",
        {"document": {"low_rank": {"rank": 2, "begin_step": 5}}},
        None,
        sgd=0.15,
    ),
    _own("localsgd", "local SGD: 32 local steps, then the mean of all parameters", {"k_steps": 32}),
    _own(
        "adaptive-localsgd",
        "local SGD with an interval that follows loss and learning rate",
        {"init_k_steps": 64, "max_k_steps": 64},
        "adaptive_localsgd",
    ),
    _own(
        "diloco",
        "16 local steps, then an outer step with Nesterov momentum on the mean change",
        {"k_steps": 16, "begin_step": 0, **_OUTER},
    ),
    _own(
        "sparse-local",
        "16 local steps, then the largest tenth of the change, at two bits",
        {"k_steps": 16, "compression": {"sparse": {"sparsity": 0.9, "value_bits": 2}}},
        adamw=0.003,
    ),
    _own(
        "muon-local",
        "16 local steps with Muon, then the whole change, at one bit",
        {"k_steps": 16, "compression": {"quantized": {"value_bits": 1}}},
        muon=0.024,
        optimizer="muon",
    ),
    _own(
        "quantized-local",
        "16 local steps, then the whole change, at four bits",
        {"k_steps": 16, "compression": {"quantized": {"value_bits": 4}}},
    ),
)
STRATEGIES = {recipe.name: recipe for recipe in _RECIPES}
"""Built-in strategies by name."""


def strategy_text(document: Mapping[str, Any]) -> str:
    """Return the strategy file of a document, as `DistributedStrategy.save` writes it."""
    from thinwire.strategy.distributed_strategy import DistributedStrategy

    with TemporaryDirectory() as folder:
        path = Path(folder) / "strategy.yaml"
        DistributedStrategy.from_dict(document).save(path)
        return path.read_text(encoding="utf-8")
