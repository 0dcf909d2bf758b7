"""An exchange of gradients as an engine uses it: exchange, commit, mean."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tests import api


def launch(
    one_round: api.Round,
    bucket: int,
    sparse: Mapping[str, api.Proposed],
    dense: Mapping[str, Tensor],
    *,
    bits: int = 32,
    exchange: str = api.GATHER,
) -> None:
    """One bucket of a round, whatever it is made of."""

    def send(context: api.Context, _: Any) -> list[api.Sending]:
        sendings = [api.send_dense(context, dense)] if dense else []
        if sparse:
            arrived = api.ArrivedEntries(context, ("messages", "sums"), [*sparse])
            how = {"value_bits": bits, "exchange": exchange}
            sendings.insert(0, api.send_entries(context, sparse, arrived, **how))
        return sendings

    one_round.launch({*sparse, *dense}, one_round.bucket(bucket, (), send))


class GradientMean:
    """The mean gradient by parameter name, and what is kept back."""

    def __init__(
        self,
        group: api.Group,
        params: Mapping[str, Any],
        compression: api.Compression | None = None,
        **told: Any,
    ) -> None:
        self.exchange: api.GradientExchange = api.gradients_of(group, params, compression, **told)

    def reduce(
        self,
        step: int,
        grads: Mapping[str, Tensor],
        *,
        overflow: bool | None = None,
        reuse: bool = False,
    ) -> dict[str, Tensor] | None:
        """The mean gradients, or None where all ranks drop the step."""
        found: dict[str, Tensor] | None = None

        def keep(means: dict[str, Tensor], *_: Any) -> None:
            nonlocal found
            found = means

        given = grads if reuse else {name: grad.clone() for name, grad in grads.items()}
        self.exchange.update(step, given, keep, overflow=overflow)
        return found

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What is kept back, by name."""
        found: dict[str, Tensor] = self.exchange.state_dict()["residuals"]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exchange, name)
