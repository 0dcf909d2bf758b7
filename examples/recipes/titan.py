"""In the manner of torchtitan's trainer, with FSDP2 on a mesh: torchrun --nproc-per-node 2
examples/recipes/titan.py.
"""

import torch
import torch.distributed as dist
from small_gpt import GPT, estimate_loss, get_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, steps: int = 48, lr: float = 6e-3, dp_replicate: int = 2) -> None:
        self.steps, self.max_norm = steps, 1.0
        dist.init_process_group("gloo")
        dp_shard = dist.get_world_size() // dp_replicate
        names = ("dp_replicate", "dp_shard")
        self.world_mesh = init_device_mesh("cpu", (dp_replicate, dp_shard), mesh_dim_names=names)
        torch.manual_seed(0)
        self.model = GPT()
        self.apply_fsdp(self.model, self.world_mesh[names])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, steps)

    def apply_fsdp(self, model: nn.Module, dp_mesh: DeviceMesh) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=dp_mesh)
        fully_shard(model, mesh=dp_mesh)

    def train_step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        inputs, labels = get_batch("train")
        _, loss = self.model(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        return loss.detach()

    def train(self) -> None:
        torch.manual_seed(dist.get_rank())
        for step in range(self.steps):
            loss = self.train_step()
            if step % 8 == 0 and dist.get_rank() == 0:
                print(f"step: {step:2}  loss: {loss.item():7.4f}")
        val_loss = estimate_loss(self.model)
        if dist.get_rank() == 0:
            print(f"val loss {val_loss:.4f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer().train()
