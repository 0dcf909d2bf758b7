"""The loop of plain.py with local updates in place of DDP: torchrun --nproc-per-node 2
examples/gpt/local.py.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw

WIDTH, HEADS, CONTEXT, BATCH, ACCUMULATE, EVAL_EVERY = 64, 4, 64, 8, 2, 15
RATE, LEAST_RATE, WARM_UP, DECAY_STEPS, DECAY = 3e-3, 3e-4, 10, 60, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            t.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm_1(x)).chunk(3, dim=2)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(256, WIDTH),
            nn.Parameter(torch.zeros(CONTEXT, WIDTH)),
        )
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.tokens(x) + self.places))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch_of(data: Tensor, number: int) -> tuple[Tensor, Tensor]:
    at = torch.randint(
        len(data) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(number)
    )
    return data[at + torch.arange(CONTEXT)].long(), data[at + torch.arange(1, CONTEXT + 1)].long()


@torch.no_grad()
def held_out_loss(model: GPT, data: Tensor) -> float:
    return sum(model(*batch_of(data, n)).item() for n in range(20)) / 20


def rate_at(step: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = min(1.0, (step - WARM_UP) / (DECAY_STEPS - WARM_UP))
    return LEAST_RATE + (RATE - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def main(steps: int, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else str  # which prints nothing
    text = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(1337)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    step, best = 0, math.inf
    with tw.local_sgd(model, optimizer, tw.LocalSGD(k_steps=5, begin_step=0)) as sync:
        path = out / f"checkpoint_{rank}.pt"  # parameters and optimizer differ from rank to rank
        if path.exists():
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            sync.load_state_dict(saved["sync"])
            step, best = saved["step"], saved["best"]

        while True:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            if step % EVAL_EVERY == 0:
                best = min(best, found := held_out_loss(model, held_out))
                say(f"step {step}: held-out loss {found:.6f}, best {best:.6f}")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step, "best": best, "sync": sync.state_dict()}, path)
            if step == steps:
                break
            for micro in range(ACCUMULATE):
                x, y = batch_of(train, (step * ACCUMULATE + micro) * world + rank)
                loss = model(x, y)
                (loss / ACCUMULATE).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            say(f"step {step}: loss {loss.item():.6f}, rate {group['lr']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    main(**vars(parser.parse_args()))
