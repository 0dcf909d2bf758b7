"""Configs with which a strategy replaces an optimizer by LARS or LAMB."""

from dataclasses import dataclass

from thinwire import _validate as check


@dataclass(frozen=True)
class LARS:
    """Replace an SGD by `thinwire.optim.Lars`, which takes over its rate, momentum, clipping and
    groups.

    >>> import thinwire as tw
    >>> strategy = tw.DistributedStrategy(lars=tw.LARS(exclude_from_weight_decay=("*.bias",)))

    Attributes:
        lars_coeff: The trust coefficient, > 0.
        lars_weight_decay: Weight decay, >= 0.
        epsilon: Added to the denominator of the trust ratio, >= 0.
        exclude_from_weight_decay: Glob patterns over parameter names.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: You et al., 2017, arXiv 1708.03888.
    """

    lars_coeff: float = 0.001
    lars_weight_decay: float = 0.0005
    epsilon: float = 0.0
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lars_coeff", check.real("lars_coeff", self.lars_coeff, above=0))
        _settle(self, "lars_weight_decay", "epsilon")


@dataclass(frozen=True)
class LAMB:
    """Replace an Adam by `thinwire.optim.Lamb`, which takes over its rate, betas, clipping and
    groups.

    >>> import thinwire as tw
    >>> strategy = tw.DistributedStrategy(lamb=tw.LAMB(lamb_weight_decay=0.01))

    Attributes:
        lamb_weight_decay: Weight decay, >= 0.
        exclude_from_weight_decay: Glob patterns over parameter names.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: You et al., 2020, arXiv 1904.00962.
    """

    lamb_weight_decay: float = 0.01
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _settle(self, "lamb_weight_decay")


def _settle(config: LARS | LAMB, *numbers: str) -> None:
    """Check the patterns, and that each of `numbers` is at least 0."""
    for name in numbers:
        object.__setattr__(config, name, check.real(name, getattr(config, name), at_least=0))
    advice = 'write a single pattern as ("*.bias",)'
    name = "exclude_from_weight_decay"
    object.__setattr__(config, name, check.words(name, getattr(config, name), advice=advice))
