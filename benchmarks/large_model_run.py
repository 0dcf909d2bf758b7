"""Worker of `benchmarks.large_model`."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from benchmarks.common import alive, sent_bytes
from thinwire.tools.run.launch import Events

UPDATES, AVERAGINGS, INTERVAL = 20, 2, 2


class Model(nn.Module):
    """As many parameters as a GPT-2 small of this width, and a cheap forward pass."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(blocks)
            )
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every place."""
        return self.norm(self.blocks(self.tokens(x))) @ self.tokens.weight.T


class Run:
    """Starts and trains, and says what it cost."""

    def __init__(self, config: dict[str, Any], events: Events) -> None:
        self.config, self.events = config, events
        self.rank = dist.get_rank()
        self.rows: list[dict[str, Any]] = []

    def train(self) -> dict[str, Any]:
        """All parts in order."""
        torch.set_num_threads(1)
        with alive(self.events):
            model = self._model()
            params = sum(p.numel() for p in model.parameters())
            self._compile()
            for part in self.config["parts"]:
                getattr(self, f"_{part}")(model)
                gc.collect()
        return {"rows": self.rows, "params": params}

    def _equal(self, model: nn.Module) -> None:
        with self._timed("start, equal replicas") as done:
            engine = tw.DistributedStrategy().prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.01), loss_of
            )
            done()
        engine.close()

    def _dgc(self, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9)
        engine = tw.DistributedStrategy(dgc=tw.DGC(sparsity=(0.999,))).prepare(
            model, optimizer, loss_of
        )
        with self._timed(f"{UPDATES} updates of DGC") as done:
            for step in range(UPDATES):
                loss = engine.train_step(*self._batch(step))
                self.say(f"update {step + 1} of DGC, loss {loss:.3f}")
            done()
        assert engine.step == UPDATES
        engine.close()

    def _local(self, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = tw.LocalSGD(k_steps=INTERVAL, begin_step=0, compression=tw.Sparse(sparsity=0.99))
        with tw.local_sgd(model, optimizer, config) as sync:
            with self._timed(
                f"{AVERAGINGS} averagings, {AVERAGINGS * INTERVAL} local steps"
            ) as done:
                for step in range(AVERAGINGS * INTERVAL):
                    loss = loss_of(model(self._batch(step)[0]), self._batch(step)[1])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.say(f"local step {step + 1}, loss {loss.item():.3f}")
                done()
            assert sync.stats()["averagings"] == AVERAGINGS

    def _different(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self.rank)
        with self._timed("start, different replicas") as done:
            engine = tw.DistributedStrategy(localsgd=tw.LocalSGD(k_steps=2)).prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.01), loss_of
            )
            done()
        engine.close()

    @contextmanager
    def _timed(self, label: str) -> Iterator[Any]:
        """A row of the result: from here to the call of what is given."""
        dist.barrier()
        sent, begin = sent_bytes(), time.perf_counter()

        def done() -> None:
            seconds = time.perf_counter() - begin
            self.rows.append(
                {"what": label, "seconds": round(seconds, 2), "bytes_sent": sent_bytes() - sent}
            )

        yield done
        self.say(f"{label}: {self.rows[-1]['seconds']} s")

    def _compile(self) -> None:
        """Kernels are compiled before any clock starts."""
        self.say("compiling")
        alone = dist.new_group([0]), dist.new_group([1])
        small = nn.Linear(256, 256)
        optimizer = tw.optim.DGCMomentum(small.parameters(), lr=0.1, process_group=alone[self.rank])
        for _ in range(2):
            small(torch.ones(1, 256)).sum().backward()
            optimizer.step()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        size = (self.config["rows"], self.config["length"] + 1)
        x = torch.randint(self.config["vocabulary"], size, generator=generator)
        return x[:, :-1], x[:, 1:]

    def _model(self) -> Model:
        torch.manual_seed(0)
        return Model(self.config["vocabulary"], self.config["width"], self.config["blocks"])

    def say(self, text: str) -> None:
        """A line for whoever waits."""
        self.events.write("said", text=text)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
