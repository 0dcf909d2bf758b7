"""A method as a stranger would add it: signs with error feedback (Karimireddy et al., 2019, arXiv
1901.09847). This file and one export."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests import api
from tests.api import COMPRESSIONS

PLACES = 2 ** torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class OneBit(api.Compression):
    """A tensor travels as the mean of its magnitudes and a sign for each entry."""

    min_numel: int = 1

    def messages(self, step: int, shapes: api.Shapes, sources: int) -> api.Messages:
        return api.Messages((), 8 + sum(4 + -(-shape.numel() // 8) for shape in shapes))

    def send(self, context: api.Context, folded: api.Computed, kept: api.Kept) -> api.Sending:
        message = torch.cat([packed(folded[name].view(-1)) for name in folded])
        [rows] = yield [api.AllGather(message, f"gathering signs of step {context.step}")]
        arrived = Signs(context, [*folded])
        lengths = [4 + -(-kept[api.RESIDUAL][name].numel() // 8) for name in folded]
        arrived.parts = dict(zip(folded, rows.split(lengths, 1), strict=True))
        return arrived


class Signs(api.Arrived):
    parts: dict[str, Tensor]

    def take_(
        self, name: str, folded: api.Computed, kept: api.Kept, into: Tensor | None = None
    ) -> Tensor:
        residual = kept[api.RESIDUAL][name]
        sent = [unpacked(row, residual) for row in self.parts[name]]
        torch.sub(folded[name], sent[self.context.source], out=residual)
        return torch.stack(sent).mean(0)


def packed(values: Tensor) -> Tensor:
    signs = values.new_zeros(-(-values.numel() // 8), 8, dtype=torch.uint8)
    signs.view(-1)[: values.numel()] = values >= 0
    scale = values.abs().mean().float().view(1)
    return torch.cat(
        [scale.view(torch.uint8), (signs * PLACES.to(signs.device)).sum(1, dtype=torch.uint8)]
    )


def unpacked(message: Tensor, like: Tensor) -> Tensor:
    signs = (
        message[4:].unsqueeze(1).bitwise_and(PLACES.to(like.device)).ne(0).view(-1)[: like.numel()]
    )
    scale = message[:4].clone().view(torch.float32).to(like.dtype)
    return torch.where(signs, scale, -scale).view_as(like)


COMPRESSIONS["one_bit"] = OneBit
