"""The strategy as an object: its fields, what it refuses, and that it stays as it was made."""

import dataclasses

import pytest

import thinwire as tw

CONFIGS = {
    "amp": tw.AMP(),
    "recompute": tw.Recompute(("a",)),
    "pipeline": tw.Pipeline(2, 4),
    "gradient_merge": tw.GradientMerge(4),
    "dgc": tw.DGC(),
    "lars": tw.LARS(),
    "lamb": tw.LAMB(),
    "localsgd": tw.LocalSGD(4),
    "adaptive_localsgd": tw.AdaptiveLocalSGD(4),
    "low_rank": tw.LowRank(),
    "compression": tw.Quantized(4),
}


def test_all_fields_are_off_by_default() -> None:
    strategy = tw.DistributedStrategy()
    assert [field.name for field in dataclasses.fields(strategy)] == list(CONFIGS)
    assert all(getattr(strategy, name) is None for name in CONFIGS)
    assert strategy.on == {}


def test_it_is_frozen_hashable_and_by_keyword_only() -> None:
    strategy = tw.DistributedStrategy(dgc=tw.DGC())
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.dgc = None  # type: ignore[misc]
    with pytest.raises(TypeError, match="without a name"):
        tw.DistributedStrategy(tw.AMP())  # type: ignore[misc]
    assert {strategy: 1}[tw.DistributedStrategy(dgc=tw.DGC())] == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_type_names_the_field_the_value_and_the_config(name: str) -> None:
    wrong = [
        True,
        {},
        3,
        type(CONFIGS[name]),
        next(c for other, c in CONFIGS.items() if other != name),
    ]
    for value in wrong:
        with pytest.raises(TypeError) as error:
            tw.DistributedStrategy(**{name: value})
        for part in (name, repr(value), type(CONFIGS[name]).__name__, "None"):
            assert part in str(error.value)


def test_one_error_lists_all_conflicts_and_a_remedy() -> None:
    sparse = tw.Sparse(0.9)
    with pytest.raises(tw.StrategyError) as error:
        tw.DistributedStrategy(
            lars=tw.LARS(),
            lamb=tw.LAMB(),
            dgc=tw.DGC(),
            localsgd=tw.LocalSGD(4, compression=sparse),
            adaptive_localsgd=tw.AdaptiveLocalSGD(4, compression=sparse),
        )
    for part in (
        "remove lars or lamb",
        "remove localsgd or adaptive_localsgd",
        "dgc and localsgd.compression",
        "dgc and adaptive_localsgd.compression",
    ):
        assert part in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", ["localsgd", "adaptive_localsgd"])
def test_compression_of_its_own_conflicts_with_dgc_only(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], compression=tw.Sparse(0.9))
    assert tw.DistributedStrategy(**{name: config}).on == {name: config}
    with pytest.raises(tw.StrategyError, match=f"give {name} compression=None"):
        tw.DistributedStrategy(dgc=tw.DGC(), **{name: config})


def test_lists_are_stored_as_tuples_and_not_shared() -> None:
    levels = [0.5, 0.75]
    strategy = tw.DistributedStrategy(dgc=tw.DGC(sparsity=levels))  # type: ignore[arg-type]
    levels.append(0.9)
    assert strategy.dgc is not None
    assert strategy.dgc.sparsity == (0.5, 0.75)
