"""In the manner of nanochat's base_train.py, with two optimizers and a Muon of its own: torchrun
--nproc-per-node 2 examples/recipes/nanochat.py.
"""

import torch
import torch.distributed as dist
from dist_optimizers import DistAdamW, DistMuon
from small_gpt import GPT, estimate_loss, get_batch

num_iterations, grad_accum_steps, warmdown_ratio = 48, 2, 0.4
embedding_lr, matrix_lr = 6e-3, 0.02

dist.init_process_group("gloo")
ddp_rank = dist.get_rank()
print0 = print if ddp_rank == 0 else lambda *_: None
torch.manual_seed(42)
model = GPT()
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
adamw_optimizer = DistAdamW(others, lr=embedding_lr, betas=(0.8, 0.95), weight_decay=0.0)
muon_optimizer = DistMuon(matrices, lr=matrix_lr, momentum=0.95)
optimizers = [adamw_optimizer, muon_optimizer]
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]


def get_lr_multiplier(it: int) -> float:
    left = (num_iterations - it) / (warmdown_ratio * num_iterations)
    return min(1.0, left)


torch.manual_seed(42 + ddp_rank)
x, y = get_batch("train")
for step in range(num_iterations):
    for _ in range(grad_accum_steps):
        _, loss = model(x, y)
        train_loss = loss.detach()
        loss = loss / grad_accum_steps
        loss.backward()
        x, y = get_batch("train")
    lrm = get_lr_multiplier(step)
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * lrm
    for group in muon_optimizer.param_groups:
        group["momentum"] = 0.85 + 0.1 * min(1.0, step / 300)
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    if step % 8 == 0:
        print0(f"step {step:05d}/{num_iterations:05d} | loss: {train_loss.item():.4f}")
val_loss = estimate_loss(model)
print0(f"val loss {val_loss:.4f}")
dist.destroy_process_group()
