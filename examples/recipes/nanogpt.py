"""In the manner of nanoGPT's train.py: torchrun --nproc-per-node 2 examples/recipes/nanogpt.py."""

import math
import os

import torch
from small_gpt import GPT, estimate_loss, get_batch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  (its name there)

max_iters, log_interval, gradient_accumulation_steps = 48, 8, 2
learning_rate, min_lr, warmup_iters, weight_decay, grad_clip = 6e-3, 6e-4, 5, 0.1, 1.0

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
master_process = ddp_rank == 0
torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers(weight_decay, learning_rate, (0.9, 0.95))
model = DDP(model)
raw_model = model.module


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


torch.manual_seed(1337 + ddp_rank)
X, Y = get_batch("train")
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
val_loss = estimate_loss(raw_model)
if master_process:
    print(f"val loss {val_loss:.4f}")
destroy_process_group()
