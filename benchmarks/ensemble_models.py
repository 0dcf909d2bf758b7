"""Models of many runs as one: weights are stacked, and one batched product serves all of them."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.ensemble_averaging import MATRICES, Run, Way, orthonormal
from benchmarks.ensemble_texts import HELD_OUT_SEQUENCES, Texts
from benchmarks.gaps import SIZES
from thinwire.tools.run.built_in import ByteTransformer
from thinwire.tools.run.config import HEAD_WIDTH, ModelSize
from thinwire.tools.run.trainers import BETAS, WEIGHT_DECAY
from thinwire.tools.run.training import rate_factor

EVALUATIONS, CHUNK = 5, 64
MOMENTUM, COEFFICIENTS, ITERATIONS, EPS = 0.95, (3.4445, -4.7750, 2.0315), 5, 1e-8


def stacked(size: ModelSize, seeds: Sequence[int], copies: int) -> dict[str, Tensor]:
    """Return parameters by name, shape (layers, models, ...); each seed has `copies` models."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(ByteTransformer(size))
    found: dict[str, Tensor] = {}
    for name in (*MATRICES, "norm1", "norm2"):
        layers = [
            torch.stack([getattr(model.blocks[i], name).weight.detach() for model in models])
            for i in range(size.layers)
        ]
        found[name] = torch.stack(layers)
    for name in ("bytes", "positions", "norm", "out"):
        found[name] = torch.stack([getattr(m, name).weight.detach() for m in models])[None]
    return {name: value.repeat_interleave(copies, 1) for name, value in found.items()}


def forward(p: Mapping[str, Tensor], text: Tensor) -> Tensor:
    """Return logits for bytes of shape (models, batch, context)."""
    models, batch, context = text.shape
    width = p["bytes"].shape[-1]
    heads = width // HEAD_WIDTH
    offsets = 256 * torch.arange(models, device=text.device)[:, None, None]
    x = p["bytes"].reshape(-1, width).index_select(0, (text + offsets).view(-1))
    x = x.view(models, batch, context, width) + p["positions"][0][:, None, :context]
    x = x.view(models, batch * context, width)
    layers = zip(*(p[name].unbind(0) for name in (*MATRICES, "norm1", "norm2")), strict=True)
    for qkv, merge, widen, narrow, norm1, norm2 in layers:
        mixed = _linear(_normed(x, norm1), qkv).view(models * batch, context, 3, heads, HEAD_WIDTH)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(seen.transpose(1, 2).reshape(x.shape), merge)
        x = x + _linear(functional.gelu(_linear(_normed(x, norm2), widen)), narrow)
    return _linear(_normed(x, p["norm"][0]), p["out"][0])


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * weight[:, None]


def loss_of(p: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over the models of their mean loss."""
    logits = forward(p, inputs).float().flatten(0, 1)
    total = functional.cross_entropy(logits, targets.reshape(-1), reduction="sum")
    return total / (targets.shape[1] * targets.shape[2])


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz of a batch of matrices, as `thinwire.core.muon`."""
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.float().norm(dim=(-2, -1), keepdim=True).clamp(min=EPS).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adamw_(
    param: Tensor,
    moment: Tensor,
    square: Tensor,
    grad: Tensor,
    rate: Tensor,
    beta2: Tensor,
    step: Tensor,
) -> None:
    moment.lerp_(grad, 1 - BETAS[0])
    square.mul_(beta2).add_((1 - beta2) * grad * grad)
    first, second = 1 - BETAS[0] ** step, 1 - beta2**step
    update = (moment / first) / ((square / second).sqrt() + EPS)
    param.mul_(1 - rate * WEIGHT_DECAY).sub_(rate * update)


def ahead_(grad: Tensor, moment: Tensor, dtype: torch.dtype) -> Tensor:
    """Update Muon's momentum; return the matrix to orthogonalise."""
    moment.lerp_(grad, 1 - MOMENTUM)
    return grad.lerp(moment, MOMENTUM).to(dtype)


def descend_(param: Tensor, update: Tensor, rate: Tensor, factor: float) -> None:
    param.mul_(1 - rate * WEIGHT_DECAY).sub_(rate * factor * update.float())


class Ensemble:
    """All models of runs with equal size, workers, batch and steps."""

    def __init__(self, runs: Sequence[Run], texts: Texts, device: str) -> None:
        self.runs = sorted(runs, key=lambda run: (run.cell.interval > 0, run.way))
        self.cell, self.texts, self.device = self.runs[0].cell, texts, torch.device(device)
        self.size, self.workers = SIZES[self.cell.size], self.cell.workers
        self.cuda = self.device.type == "cuda"
        self.half = torch.autocast(self.device.type, torch.bfloat16, self.cuda)
        made = stacked(self.size, [run.cell.seed for run in self.runs], self.workers)
        self.params = {n: p.to(device).contiguous().requires_grad_() for n, p in made.items()}
        self.moments = {n: torch.zeros_like(p) for n, p in self.params.items()}
        others = {n: p for n, p in self.params.items() if n not in MATRICES}
        self.squares = {n: torch.zeros_like(p) for n, p in others.items()}
        self.rows = {n: torch.zeros_like(self.params[n][..., :1]) for n in MATRICES}
        self.dense = sum(not run.cell.interval for run in self.runs) * self.workers
        self.rate = self._of_models(lambda run: run.cell.lr)
        self.adam_scale = self._of_models(lambda run: run.options.get("adam_lr_scale", 1.0))
        self.adam_beta2 = self._of_models(lambda run: run.options.get("adam_beta2", BETAS[1]))
        self.row_decay = self._of_models(lambda run: run.options.get("rows", 0.0))
        self.by_rows = any("rows" in run.options for run in self.runs)
        self.soap = int(self.runs[0].options.get("soap", 0))
        self.bases: dict[str, Bases] = {}
        steps = self.cell.steps
        factors = [rate_factor(step / steps) for step in range(steps)]
        self.factors = torch.tensor(factors, device=device)
        starts = [
            texts.starts(run.cell, k, own_folders="folders" in run.options)
            for run in self.runs
            for k in range(self.workers)
        ]
        self.starts, self.train = torch.stack(starts).to(device), texts.train.to(device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.reach = torch.arange(self.size.context + 1, device=device)
        self.losses: list[list[tuple[int, float]]] = [[] for _ in self.runs]
        self.done = 0
        corrected = self.moments if any("correction" in run.options for run in self.runs) else {}
        self.corrections = {n: torch.zeros_like(p) for n, p in corrected.items()}
        self.summed = {n: torch.zeros_like(p) for n, p in corrected.items()}
        self.ways = [Way(self, *found) for found in self._ways()]
        # on a CPU it gains a seventh, and takes a minute
        self._made: Mapping[str, Any] = {
            function.__name__: torch.compile(function, dynamic=function is not loss_of)
            if self.cuda
            else function
            for function in (loss_of, adamw_, ahead_, descend_)
        }

    def _of_models(self, of: Callable[[Run], float]) -> Tensor:
        values = [float(of(run)) for run in self.runs for _ in range(self.workers)]
        return torch.tensor(values, device=self.device)

    def _ways(self) -> Iterator[tuple[list[Run], int]]:
        begin = self.dense // self.workers
        while begin < len(self.runs):
            same = [run for run in self.runs[begin:] if run.way == self.runs[begin].way]
            yield same, begin
            begin += len(same)

    def _step(self) -> None:
        """One local step of every model, without a look at the device."""
        starts = self.starts.index_select(1, self.at.view(1)).squeeze(1)
        whole = self.train[starts[..., None] + self.reach].long()
        with self.half:
            loss = self._made["loss_of"](self.params, whole[..., :-1], whole[..., 1:])
        found = torch.autograd.grad(loss, list(self.params.values()))
        grads = dict(zip(self.params, found, strict=True))
        with torch.no_grad():
            if self.dense:
                for grad in grads.values():
                    own = grad[:, : self.dense]
                    parts = own.unflatten(1, (-1, self.workers))
                    own.copy_(parts.mean(2, keepdim=True).expand_as(parts).flatten(1, 2))
            for name, correction in self.corrections.items():
                self.summed[name] += grads[name]
                grads[name] = grads[name] + correction
            rate = self.rate * self.factors.index_select(0, self.at.view(1))
            self.at += 1
            for name, grad in grads.items():
                if name in MATRICES:
                    self._muon_(name, grad, rate)
                else:
                    self._adamw_(name, grad, rate * self.adam_scale)

    def _adamw_(self, name: str, grad: Tensor, rate: Tensor) -> None:
        shape = (1, -1) + (1,) * (grad.ndim - 2)
        beta2, own = self.adam_beta2.view(shape), (self.moments[name], self.squares[name])
        self._made["adamw_"](self.params[name], *own, grad, rate.view(shape), beta2, self.at)

    def _muon_(self, name: str, grad: Tensor, rate: Tensor) -> None:
        param, moment = self.params[name], self.moments[name]
        if self.soap:
            moment.lerp_(grad, 1 - MOMENTUM)
            if name not in self.bases:
                self.bases[name] = Bases(grad, self.soap)
            update, factor = self.bases[name].update(grad, moment, MOMENTUM), 0.2
        else:
            dtype = torch.bfloat16 if self.cuda else torch.float32
            matrix = self._made["ahead_"](grad, moment, dtype).flatten(0, 1)
            update = orthogonal(matrix).view_as(param)
            update = self._by_rows(name, update.float()) if self.by_rows else update
            factor = 0.2 * math.sqrt(max(param.shape[-2:]))
        self._made["descend_"](param, update, rate[None, :, None, None], factor)

    def _by_rows(self, name: str, update: Tensor) -> Tensor:
        """Divide rows by the root of their second moment, at the same norm of the matrix."""
        decay, rows = self.row_decay[None, :, None, None], self.rows[name]
        rows.mul_(decay).add_((1 - decay) * update.square().mean(-1, keepdim=True))
        scaled = update / (rows.sqrt() + EPS)
        norms = [x.norm(dim=(-2, -1), keepdim=True) for x in (update, scaled)]
        return torch.where(decay > 0, scaled * (norms[0] / norms[1].clamp(min=EPS)), update)

    def run(self, until_s: float = math.inf) -> bool:
        """Take all steps; return False if the time was over before."""
        self._evaluate()
        step = self._captured() if self.cuda and not self.soap else self._step
        while self.done < self.cell.steps:
            step()
            self.done += 1
            ends = self.done == self.cell.steps
            for way in self.ways:
                if (self.done - 1) % way.interval == 0 or ends:
                    way.average_()
            before = (self.done - 1) * EVALUATIONS // self.cell.steps
            if self.done * EVALUATIONS // self.cell.steps > before:
                self._evaluate()
            if self.done % 64 == 0 and time.monotonic() > until_s:
                return False
        return True

    def _captured(self) -> Any:
        """Return the step as a CUDA graph; the first steps, which torch needs, leave no trace."""
        tensors = [*self.params.values(), *self.moments.values(), *self.squares.values()]
        tensors += [*self.rows.values(), *self.summed.values(), self.at]
        kept = [tensor.detach().clone() for tensor in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        return graph.replay

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Append the held-out loss of the mean model of every run."""
        models = {
            name: p.unflatten(1, (-1, self.workers)).mean(2) for name, p in self.params.items()
        }
        totals = torch.zeros(len(self.runs), device=self.device)
        text = self.texts.held_out.to(self.device)
        starts = torch.stack([self.texts.held_out_starts(run.cell) for run in self.runs])
        for part in starts.to(self.device).split(CHUNK, 1):
            whole = text[part[..., None] + self.reach].long()
            with self.half:
                logits = forward(models, whole[..., :-1]).float()
            targets = whole[..., 1:].flatten(1)
            losses = functional.cross_entropy(logits.mT, targets, reduction="none")
            totals += losses.sum(1)
        means = (totals / (HELD_OUT_SEQUENCES * self.size.context)).tolist()
        for own, mean in zip(self.losses, means, strict=True):
            own.append((self.done, mean))

    def lines(self, seconds: float) -> list[dict[str, Any]]:
        """Return the results, as `benchmarks.law` writes them, with the options."""
        numel = sum(p[:, :1].numel() for p in self.params.values())
        rounds = {id(run): way.rounds for way in self.ways for run in way.runs}
        found = []
        for run, losses in zip(self.runs, self.losses, strict=True):
            last = losses[-1][1]
            found.append(
                {
                    "cell": asdict(run.cell),
                    "loss": round(last, 5) if math.isfinite(last) else None,
                    "losses": [[step, round(loss, 5)] for step, loss in losses],
                    "rounds": rounds.get(id(run), run.cell.steps),
                    "parameters": numel,
                    "device": self.device.type,
                    "seconds": round(seconds / len(self.runs), 2),
                    "options": dict(run.options),
                }
            )
        return found


class Bases:
    """The eigenvectors that SOAP rotates a gradient by; Vyas et al., 2024, arXiv 2409.11321."""

    def __init__(self, grad: Tensor, every: int) -> None:
        flat = grad.flatten(0, 1)
        self.every, self.step = every, 0
        self.left = flat.new_zeros(len(flat), flat.shape[1], flat.shape[1])
        self.right = flat.new_zeros(len(flat), flat.shape[2], flat.shape[2])
        self.square = torch.zeros_like(flat)
        self.bases: tuple[Tensor, Tensor] | None = None

    def update(self, grad: Tensor, moment: Tensor, beta: float) -> Tensor:
        """Return the direction, of about the RMS of AdamW's."""
        flat, mean = grad.flatten(0, 1), moment.flatten(0, 1)
        self.step += 1
        self.left.lerp_(flat @ flat.mT, 1 - beta)
        self.right.lerp_(flat.mT @ flat, 1 - beta)
        if self.bases is None:
            self.bases = _eigenvectors(self.left), _eigenvectors(self.right)
        left, right = self.bases
        turned = left.mT @ flat @ right
        self.square.lerp_(turned * turned, 1 - beta)
        scale = (self.square / (1 - beta**self.step)).sqrt() + EPS
        first = (left.mT @ mean @ right) / (1 - beta**self.step)
        update = (left @ (first / scale) @ right.mT).view_as(grad)
        if self.step % self.every == 0:
            self.bases = _turned(self.left, left), _turned(self.right, right)
        return update


def _eigenvectors(symmetric: Tensor) -> Tensor:
    return torch.linalg.eigh(symmetric.double())[1].float()


def _turned(symmetric: Tensor, basis: Tensor) -> Tensor:
    """One power iteration, then orthogonal columns."""
    found = orthonormal(symmetric @ basis)
    return torch.where(torch.isfinite(found).all(-1).all(-1)[:, None, None], found, basis)
