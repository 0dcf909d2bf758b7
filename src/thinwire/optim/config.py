"""Configs with which a strategy replaces an optimizer by LARS or LAMB."""

from dataclasses import dataclass

from thinwire import _validate as check

_ADVICE = 'write a single pattern as ("*.bias",)'


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
        check.set_fields(self, check.real, "lars_coeff", above=0)
        check.set_fields(self, check.real, "lars_weight_decay", "epsilon", at_least=0)
        check.set_fields(self, check.words, "exclude_from_weight_decay", advice=_ADVICE)


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
        check.set_fields(self, check.real, "lamb_weight_decay", at_least=0)
        check.set_fields(self, check.words, "exclude_from_weight_decay", advice=_ADVICE)
