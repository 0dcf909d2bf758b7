"""What holds in every framework: its loop trains as ours, saves, resumes, and refuses alike."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.integrations.frameworks import FRAMEWORKS
from tests.integrations.packages import needs
from tests.integrations.task import STRATEGIES, Plan, Trained, adamw, dgc, equal, lamb, sgd
from tests.ranks import Pool

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
ADAPTIVE = tw.AdaptiveLocalSGD(init_k_steps=4, begin_step=3)
SEVENTH = tw.LocalSGD(k_steps=7, begin_step=3)
OUTER = tw.LocalSGD(k_steps=5, begin_step=3, outer_lr=0.7, outer_momentum=0.5)
OF_BATCHES = {
    **{name: Plan(name, accumulated=2, clip=0.1) for name in STRATEGIES},
    "none, plain": Plan("none"),
    "adaptive_localsgd, plain": Plan("adaptive_localsgd"),
    "compressed": Plan("compressed", dgc, 4, accumulated=2),
    "compressed, narrow": Plan("compressed", dgc, 4, accumulated=2, narrow=True),
}
OF_UPDATES = {
    **{name: Plan(name, adamw, 1, clip=1.0) for name in STRATEGIES if name != "recompute"},
    **{
        f"{name}, accumulated": Plan(name, adamw, 1, accumulated=2, clip=0.1)
        for name in ("none", "dgc", "adaptive_localsgd")
    },
    "none, narrow": Plan("none", adamw, 1, clip=1.0, narrow=True),
    "dgc, sgd": Plan("dgc", sgd, 1),
}
PLANS: dict[str, dict[str, Plan]] = {
    "accelerate": {
        **OF_BATCHES,
        "local": Plan(SEVENTH, sgd, 4),
        "local, narrow": Plan(SEVENTH, sgd, 4, narrow=True),
    },
    "lightning": {
        **OF_BATCHES,
        "local, lamb": Plan(SEVENTH, lamb, 4),
        "local, adaptive": Plan(ADAPTIVE, sgd, 4),
    },
    "transformers": OF_UPDATES,
}
RESUMED = ("dgc", "low_rank", "lamb", "localsgd", "adaptive_localsgd")
OF_RESUMED: dict[str, dict[str, Plan]] = {
    **{
        name: {
            **{method: Plan(method) for method in RESUMED},
            "compressed": Plan("compressed", dgc, accumulated=2),
        }
        for name in ("accelerate", "lightning")
    },
    "transformers": {
        **{method: Plan(method, adamw, 1, clip=1.0) for method in RESUMED},
        "dgc, sgd": Plan("dgc", sgd, 1),
        "low_rank, accumulated": Plan("low_rank", adamw, 2, accumulated=2, clip=1.0),
    },
}
OF_RESUMED["lightning"]["local"] = Plan(OUTER, sgd)


def rows(plans: dict[str, dict[str, Plan]]) -> list[Any]:
    return [
        pytest.param(framework, plan, marks=needs(framework), id=f"{framework}, {name}")
        for framework, named in plans.items()
        for name, plan in named.items()
    ]


def trained(
    rank: int, size: int, framework: str, plan: Plan, folder: Path, resumes: bool = False
) -> Trained:
    return FRAMEWORKS[framework].train(rank, size, plan, folder, resumes)


def own(rank: int, size: int, framework: str, plan: Plan, folder: Path) -> Trained:
    return FRAMEWORKS[framework].own(rank, size, plan, folder)


@pytest.mark.parametrize(("framework", "plan"), rows(PLANS))
def test_framework_is_a_plain_loop(ranks: Pool, tmp_path: Path, framework: str, plan: Plan) -> None:
    first, second = ranks.run(trained, framework, plan, tmp_path, timeout_s=120)
    plain, _ = ranks.run(own, framework, plan, tmp_path, timeout_s=120)
    assert equal(first.parameters, second.parameters)
    assert first.held_out == second.held_out < first.losses[0]
    assert first.stats["step"] == plain.stats["step"]
    assert len(first.losses) == len(plain.losses)
    assert all(each.element_size() >= 4 for each in first.states)
    if plan.epochs == 4:
        assert sum(first.losses[-5:]) < 0.8 * sum(first.losses[:5])
        assert first.stats["ratio"] > (8 if plan.method == "compressed" else 2)
    if framework == "transformers" or not plan.narrow:  # else the plain loop has another precision
        assert first.losses == pytest.approx(plain.losses, rel=1e-6)
        assert equal(first.parameters, plain.parameters)


@pytest.mark.parametrize(("framework", "plan"), rows(OF_RESUMED))
def test_training_resumes_alike(ranks: Pool, tmp_path: Path, framework: str, plan: Plan) -> None:
    whole = ranks.run(trained, framework, plan, tmp_path, timeout_s=120)
    again = ranks.run(trained, framework, replace(plan, seed=7), tmp_path, True, timeout_s=120)
    for one, other in zip(whole, again, strict=True):
        assert 0 < len(other.losses) < len(one.losses)
        assert one.losses[-len(other.losses) :] == other.losses
        assert equal(one.parameters, other.parameters)
        assert equal(one.states, other.states)
        for key in ("step", "averagings", "k_steps", "dropped_steps"):
            assert one.stats.get(key) == other.stats.get(key)
    if plan.method == "compressed":
        assert not equal(whole[0].states, whole[1].states)


@pytest.mark.parametrize(
    ("framework", "field", "config", "advice"),
    [
        pytest.param(framework, field, config, advice, marks=needs(framework))
        for field, config, remedies in [
            ("amp", tw.AMP("bfloat16"), ("bf16-mixed", "bf16=True")),
            ("recompute", tw.Recompute(("*",)), (None, "activation_checkpointing=True")),
            (
                "gradient_merge",
                tw.GradientMerge(2),
                ("accumulate_grad_batches", "gradient_accumulation_steps"),
            ),
            ("pipeline", tw.Pipeline(stages=2, micro_batches=2), ("engine.train_step", "fsdp")),
        ]
        for framework, advice in zip(("lightning", "transformers"), remedies, strict=True)
        if advice
    ],
)
def test_trainer_setting_is_refused(framework: str, field: str, config: Any, advice: str) -> None:
    callback = import_module(f"thinwire.integrations.{framework}").ThinwireCallback
    with pytest.raises(tw.StrategyError, match=rf"{field}: use .*{advice}"):
        callback(tw.DistributedStrategy(**{field: config}))
