"""A job of the workers that trains over a limited link and tells how it went."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import thinwire as tw
from tests.api import Events

STEPS = 12


class Pacing:
    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        model = nn.Linear(256, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.engine = tw.DistributedStrategy().prepare(model, optimizer, nn.functional.mse_loss)
        events.write("prepared")
        events.wait_for_release()

    def train(self) -> dict[str, Any]:
        for _ in range(STEPS):
            self.engine.train_step(torch.randn(4, 256), torch.randn(4, 512))
        return dict(self.engine.stats())
