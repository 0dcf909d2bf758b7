from pathlib import Path

import pytest

from tests.api import STRATEGIES, DistributedStrategy, choose


def file(folder: Path, text: str, name: str = "plan.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_called_by_its_stem_and_carries_the_whole_strategy(tmp_path: Path) -> None:
    dense, plan = choose(
        ["dense", file(tmp_path, "dgc:\n  sparsity: [0.99]\ngradient_merge:\n  k_steps: 2\n")]
    )
    assert (dense.name, plan.name) == ("dense", "plan")
    assert plan.summary == "strategy file plan.yaml: gradient_merge, dgc"
    assert plan.options["document"]["dgc"]["sparsity"] == [0.99]
    fields = [choose([file(tmp_path, f"{field}: {{}}\n")])[0] for field in ("lamb", "lars")]
    lamb, lars = (recipe.rates["sgd"] for recipe in fields)
    assert lamb < plan.rates["sgd"] < lars


@pytest.mark.parametrize(
    "name", ["dense", "dgc", "low-rank", "sparse-local", "quantized-local", "muon-local"]
)
def test_file_trains_at_the_rates_of_the_strategy_it_holds(name: str, tmp_path: Path) -> None:
    document = STRATEGIES[name].document(20)
    assert document is not None
    DistributedStrategy.from_dict(document).save(tmp_path / "winner.yaml")
    (again,) = choose([str(tmp_path / "winner.yaml")])
    assert again.rates == STRATEGIES[name].rates


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dcg:\n  sparsity: [0.9]\n", "dgc"),
        ("pipeline:\n  stages: 2\n  micro_batches: 2\n", "remove pipeline"),
    ],
)
def test_wrong_strategy_file_is_reported(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        choose([file(tmp_path, text)])
    assert "plan.yaml" in str(error.value)


def test_every_row_has_a_name_of_its_own(tmp_path: Path) -> None:
    both = choose(["dense", file(tmp_path, "dgc: {}\n", "dense.yaml")])
    assert [recipe.name for recipe in both] == ["dense", "dense.yaml"]
    with pytest.raises(ValueError, match="given twice"):
        choose([file(tmp_path, "dgc: {}\n")] * 2)
    with pytest.raises(ValueError, match=r"nowhere\.yaml' cannot be read: No such file"):
        choose([str(tmp_path / "nowhere.yaml")])
