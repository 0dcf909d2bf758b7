import pytest

from thinwire.lab import strategies
from thinwire.lab.strategies import STRATEGIES, Recipe, check_names, register


def test_the_first_four_are_there() -> None:
    assert {"dense", "fp16", "powersgd", "dgc"} <= set(STRATEGIES)
    assert check_names(["dgc", "dense"]) == ("dgc", "dense")


def test_later_strategies_register_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "STRATEGIES", dict(STRATEGIES))
    register(Recipe("other", "another one", "thinwire.lab.trainers:Dense", 0.1, "nobody"))
    assert check_names(["other"]) == ("other",)
    with pytest.raises(ValueError, match="registered already"):
        register(Recipe("other", "again", "thinwire.lab.trainers:Dense", 0.1, "nobody"))


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean powersgd"):
        check_names(["PowerSDG"])
    with pytest.raises(ValueError, match="choose from") as error:
        check_names(["zzz"])
    assert "did you mean" not in str(error.value)
