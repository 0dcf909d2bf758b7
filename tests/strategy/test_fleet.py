"""Every attribute of a fleet description: mapped, refused or noted, and all of it said at once."""

import copy
import warnings
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

import thinwire as tw

from_fleet = tw.DistributedStrategy.from_fleet


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def read(description: Any) -> tuple[tw.DistributedStrategy, str]:
    """The strategy, and what was warned of; at most one warning, blamed on the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = from_fleet(description)
    assert len(caught) <= 1
    for warning in caught:
        assert warning.category is UserWarning
        assert warning.filename == __file__
    return strategy, "".join(str(warning.message) for warning in caught)


def refused(description: Any) -> str:
    with pytest.raises(tw.StrategyError) as error:
        read(description)
    return str(error.value)


MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"gradient_merge": True}, {"gradient_merge": tw.GradientMerge(1)}),
    (
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": False}},
        {"gradient_merge": tw.GradientMerge(4, avg=False)},
    ),
    (
        {"lars": True, "lars_configs": {"lars_coeff": 1, "lars_weight_decay": 0, "epsilon": 0}},
        {"lars": tw.LARS(1.0, 0.0, 0.0)},
    ),
    (
        {"lars": True, "lars_configs": {"exclude_from_weight_decay": None}},
        {"lars": tw.LARS(0.001, 0.0005, 0.0)},
    ),
    (
        {"lars": True, "lars_configs": {"exclude_from_weight_decay": ["batch_norm", ".b"]}},
        {"lars": tw.LARS(exclude_from_weight_decay=("*batch_norm*", "*.b*"))},
    ),
    ({"localsgd": True}, {"localsgd": tw.LocalSGD(1, begin_step=1)}),
    (
        {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}},
        {"localsgd": tw.LocalSGD(4, begin_step=30)},
    ),
    ({"a_sync": False, "mode": "COLLECTIVE", "auto": False, "sharding": False, "asp": False}, {}),
    ({"a_sync": True, "a_sync_configs": {"k_steps": -1}, "mode": 1}, {}),
    (
        {"hybrid_configs": {"dp_degree": -1, "pp_degree": 1, "mp_degree": 1, "sharding_degree": 1}},
        {},
    ),
    ({"gradient_scale_configs": {"scale_strategy": "avg", "scale_gradient": False}}, {}),
]


NOTED_MAPS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"amp": True, "amp_configs": {"use_dynamic_loss_scaling": False, "init_loss_scaling": 128}},
        {"amp": tw.AMP("float16", tw.FixedLossScale(128.0))},
        [],
    ),
    (
        {"recompute": True, "recompute_configs": {"checkpoints": ["x", "y"]}},
        {"recompute": tw.Recompute(("x", "y"))},
        ["names of tensors in fleet"],
    ),
    ({"dgc": True}, {"dgc": tw.DGC(0, 1, (0.999,), value_bits=1)}, ["one bit", "value_bits=32"]),
    (
        {
            "dgc": True,
            "dgc_configs": {"rampup_begin_step": 10, "rampup_step": 20, "sparsity": [0, 0.5]},
        },
        {"dgc": tw.DGC(10, 20, (0.0, 0.5))},
        ["one bit"],
    ),
    (
        {
            "lamb": True,
            "lamb_configs": {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": []},
        },
        {"lamb": tw.LAMB()},
        ["1e-6"],
    ),
    (
        {"lamb": True, "lamb_configs": {"exclude_from_weight_decay": ["b_0"]}},
        {"lamb": tw.LAMB(0.01, ("*b_0",))},
        ["1e-6"],
    ),
    (
        {"amp": True},
        {"amp": tw.AMP("float16", tw.DynamicLossScale(32768.0, 2.0, 1000))},
        ["every overflow divides"],
    ),
    (
        {
            "amp": True,
            "amp_configs": {
                "init_loss_scaling": 8,
                "incr_ratio": 3,
                "incr_every_n_steps": 5,
                "decr_ratio": 0.5,
            },
        },
        {"amp": tw.AMP("float16", tw.DynamicLossScale(8.0, 3.0, 5))},
        ["amp_configs.decr_ratio=0.5"],
    ),
    (
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4}},
        {"adaptive_localsgd": tw.AdaptiveLocalSGD(4)},
        ["outside the square root"],
    ),
    (
        {"pipeline": True, "pipeline_configs": {"micro_batch": 12}},
        {"pipeline": tw.Pipeline(1, 12)},
        ["device_guard", "split_points"],
    ),
    (
        {
            "pipeline": True,
            "pipeline_configs": {"accumulate_steps": 3, "schedule_mode": "F-then-B"},
            "hybrid_configs": {"pp_degree": 4},
        },
        {"pipeline": tw.Pipeline(4, 3, "gpipe")},
        ["hybrid_configs.pp_degree"],
    ),
    (
        {
            "pipeline": True,
            "pipeline_configs": {
                "accumulate_steps": 3,
                "micro_batch": 3,
                "micro_batch_size": 2,
                "p2p_cache_shape": False,
            },
        },
        {"pipeline": tw.Pipeline(1, 3, "1f1b")},
        ["micro_batch_size=2", "p2p_cache_shape=False"],
    ),
]


ALL = [*((description, fields, None) for description, fields in MAPPED), *NOTED_MAPS]


@pytest.mark.parametrize(("description", "fields", "parts"), ALL, ids=str)
def test_fleet_mapped_attributes_that_differ_are_noted(
    description: dict[str, Any], fields: dict[str, Any], parts: list[str] | None
) -> None:
    strategy, warned = read(description)
    assert strategy == tw.DistributedStrategy(**fields)
    assert warned == "" or parts is not None
    for part in parts or []:
        assert part in warned


def test_fleet_exclusions_take_names_literally() -> None:
    words = ["a[0]", "b*", "c?"]
    lars, _ = read({"lars": True, "lars_configs": {"exclude_from_weight_decay": words}})
    lamb, _ = read({"lamb": True, "lamb_configs": {"exclude_from_weight_decay": words}})
    assert lars.lars is not None
    assert lamb.lamb is not None
    for names, contained, at_the_end in (
        (["x.a[0].y", "b*y", "c?y"], True, False),
        (["x.a[0]", "xb*", "xc?"], True, True),
        (["x.a0", "bx", "cx"], False, False),
    ):
        for word_lars, word_lamb, name in zip(
            lars.lars.exclude_from_weight_decay,
            lamb.lamb.exclude_from_weight_decay,
            names,
            strict=True,
        ):
            assert (fnmatchcase(name, word_lars), fnmatchcase(name, word_lamb)) == (
                contained,
                at_the_end,
            )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"recompute": True}, "checkpoints is empty"),
    (
        {"recompute": True, "recompute_configs": {"checkpoints": ["a"], "enable_offload": True}},
        "not moved to the host",
    ),
    (
        {"pipeline": True, "pipeline_configs": {"micro_batch": 2, "accumulate_steps": 3}},
        "set one of them",
    ),
    ({"pipeline": True, "pipeline_configs": {"schedule_mode": "VPP"}}, "'VPP'"),
    ({"amp": True, "amp_configs": {"custom_white_list": ["exp"]}}, "autocast decides"),
    ({"amp": True, "amp_configs": {"custom_black_list": ["exp"]}}, "autocast decides"),
    ({"amp": True, "amp_configs": {"custom_black_varnames": ["x"]}}, "autocast decides"),
    ({"amp": True, "amp_configs": {"use_pure_fp16": True}}, "convert the model's dtype"),
    ({"hybrid_configs": {"pp_degree": 2}}, "without pipeline=True"),
    ({"hybrid_configs": {"mp_degree": 2}}, "tensors are not split over ranks"),
    ({"hybrid_configs": {"sharding_degree": 2}}, "cannot shard"),
    (
        {"sharding": True, "sharding_configs": {"stage": 2}},
        "a description cannot shard optimizer state and parameters",
    ),
    ({"tensor_parallel": True}, "tensors are not split over ranks"),
    ({"fp16_allreduce": True}, "value_bits=16"),
    ({"asp": True}, "structured sparsity"),
    ({"sync_batch_norm": True}, "torch.nn.SyncBatchNorm"),
    ({"a_sync": True}, "use localsgd instead"),
    ({"a_sync": True, "a_sync_configs": {"k_steps": 0}}, "use localsgd instead"),
    ({"auto": True}, "name the features you want"),
    ({"semi_auto": True}, "name the features you want"),
    ({"auto_search": True}, "name the features you want"),
    ({"mode": "PS"}, "mode='PS'"),
    ({"mode": 2}, "mode=2"),
    ({"gradient_scale_configs": {"scale_strategy": "sum"}}, "multiply the loss instead"),
    ({"gradient_scale_configs": {"scale_gradient": True}}, "multiply the loss instead"),
    ({"lars": True, "lamb": True}, "remove lars or lamb"),
    (
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 0}},
        "gradient_merge_configs.k_steps",
    ),
    ({"amp": True, "amp_configs": {"init_loss_scaling": 0}}, "amp_configs.init_loss_scaling"),
    ({"amp": True, "amp_configs": {"incr_every_n_steps": 0}}, "amp_configs.incr_every_n_steps"),
    ({"dgc": True, "dgc_configs": {"sparsity": [1.0]}}, "dgc_configs.sparsity[0]"),
]


UNKNOWN = [
    ({"gradient_merg": True}, ["gradient_merg=True", "'gradient_merge'"]),
    ({"dgc": True, "dgc_configs": {"sparsty": [0.9]}}, ["dgc_configs.sparsty=[0.9]", "'sparsity'"]),
    ({"lars_configs": {"lars_coef": 1}}, ["lars_configs.lars_coef=1", "'lars_coeff'"]),
    ({"hybrid_configs": {"dp_degre": 1}}, ["'dp_degree'"]),
    ({4: 5}, ["4=5 is unknown"]),
    ({"a\x1b]0;b\x07": 5}, [r"'a\x1b]0;b\x07'=5 is unknown"]),
    ({"dgc_configs": {"a\x07": 5}}, [r"'dgc_configs.a\x07'=5 is unknown"]),
    (
        {"lamb": True, "lamb_configs": {"lamb_wd": 0.1}},
        ["lamb_configs.lamb_wd=0.1", "known are exclude_from_weight_decay, lamb_weight_decay"],
    ),
]


@pytest.mark.parametrize(
    ("description", "parts"), [*((given, [part]) for given, part in REFUSED), *UNKNOWN], ids=str
)
def test_fleet_refused_and_unknown_give_a_reason(description: Any, parts: list[str]) -> None:
    said = refused(description)
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("configs", "part"),
    [
        *(
            ({name: True}, name)
            for name in (
                "elastic",
                "nccl_comm_num",
                "fuse_grad_size_in_MB",
                "find_unused_parameters",
            )
        ),
        ({"amp_configs": {"use_fp16_guard": False}}, "use_fp16_guard=False"),
        ({"amp_configs": {"decr_every_n_nan_or_inf": 4}}, "decr_every_n_nan_or_inf=4"),
        (
            {"recompute_configs": {"checkpoints": ["a"], "checkpoint_shape": [2, 3]}},
            "checkpoint_shape=[2, 3]",
        ),
    ],
    ids=str,
)
def test_fleet_names_without_counterpart_are_noted(configs: dict[str, Any], part: str) -> None:
    (name,) = configs
    assert part in read({name.removesuffix("_configs"): True, **configs})[1]


def test_fleet_configs_of_a_feature_that_is_off_have_no_effect() -> None:
    strategy, warned = read(
        {"dgc": False, "dgc_configs": {"sparsity": [0.5]}, "amp_configs": {"use_pure_fp16": True}}
    )
    assert strategy == tw.DistributedStrategy()
    assert all(f"{name}_configs: without effect" in warned for name in ("amp", "dgc"))


WRONG_TYPES = [
    ({"dgc": 1}, ["dgc must be True or False", "1", "int"]),
    ({"amp": "true"}, ["amp must be True or False"]),
    ({"sharding": 0}, ["sharding must be True or False"]),
    ({"a_sync": None}, ["a_sync must be True or False"]),
    ({"dgc": True, "dgc_configs": []}, ["dgc_configs must be a mapping"]),
    (
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4.0}},
        ["gradient_merge_configs.k_steps", "4.0"],
    ),
    ({"amp": True, "amp_configs": {"incr_ratio": "2"}}, ["amp_configs.incr_ratio", "'2'"]),
    (
        {"lars": True, "lars_configs": {"exclude_from_weight_decay": "bias"}},
        ["exclude_from_weight_decay", "'bias'"],
    ),
    (
        {"lamb": True, "lamb_configs": {"exclude_from_weight_decay": [1]}},
        ["exclude_from_weight_decay[0]"],
    ),
    ({"hybrid_configs": {"dp_degree": "2"}}, ["hybrid_configs.dp_degree", "'2'"]),
    (3, ["description must be a mapping", "3"]),
]


@pytest.mark.parametrize(("description", "parts"), WRONG_TYPES, ids=str)
def test_fleet_wrong_types_are_named(description: Any, parts: list[str]) -> None:
    with pytest.raises(TypeError) as error:
        read(description)
    for part in parts:
        assert part in str(error.value)


def test_fleet_problems_are_reported_together() -> None:
    amp = {"amp": True, "amp_configs": {"init_loss_scaling": 0, "use_pure_fp16": True}}
    said = refused({"lars": True, "lamb": True, "drg": True, "mode": "PS", **amp})
    for part in ("lars and lamb", "drg=True", "mode='PS'", "use_pure_fp16", "init_loss"):
        assert part in said


def test_fleet_stages_without_a_degree_are_ranks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert read({"pipeline": True})[0].pipeline == tw.Pipeline(4, 1)


def test_fleet_number_of_replicas_is_checked_by_prepare() -> None:
    strategy, said = read({"hybrid_configs": {"dp_degree": 3}})
    assert "dp_degree" not in said
    assert strategy == tw.DistributedStrategy()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(tw.StrategyError, match="dp_degree=3, but the 1 ranks"):
        strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    read({"hybrid_configs": {"dp_degree": 1}})[0].prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )


def test_fleet_description_is_not_changed() -> None:
    description = {"dgc": True, "dgc_configs": {"sparsity": [0.5]}}
    before = copy.deepcopy(description)
    read(description)
    assert description == before
