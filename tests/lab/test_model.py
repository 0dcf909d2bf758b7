import pytest
import torch

from tests.api import ByteTransformer, ModelSize, parse_size


def parameters(size: str) -> int:
    return sum(p.numel() for p in ByteTransformer(parse_size(size)).parameters())


def test_the_default_has_about_three_million_parameters() -> None:
    assert 2.8e6 < parameters("medium") < 3.6e6


@pytest.mark.parametrize(("size", "wanted"), [("1M", 1e6), ("300k", 3e5), ("6000000", 6e6)])
def test_a_number_is_met_nearly(size: str, wanted: float) -> None:
    assert 0.7 * wanted < parameters(size) < 1.5 * wanted


@pytest.mark.parametrize("size", ["", "huge", "-3M", "3G", "10", "1000M", "nan"])
def test_malformed_size_is_named(size: str) -> None:
    with pytest.raises(ValueError, match="size="):
        parse_size(size)


def test_no_position_sees_the_future() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(ModelSize(64, 2, context=16)).eval()
    text = torch.randint(256, (2, 16))
    changed = text.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_an_untrained_model_guesses_evenly() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(parse_size("tiny"))
    text = torch.randint(256, (8, 128))
    loss = torch.nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.15)
