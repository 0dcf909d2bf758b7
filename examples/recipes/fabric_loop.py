"""In the manner of Lightning's examples, by Fabric: torchrun --nproc-per-node 2
examples/recipes/fabric_loop.py.
"""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from small_gpt import GPT, Windows, estimate_loss
from torch.utils.data import DataLoader


def main() -> None:
    devices, nodes = (int(os.environ[f"{part}_WORLD_SIZE"]) for part in ("LOCAL", "GROUP"))
    fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    seed_everything(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 48)
    model, optimizer = fabric.setup(model, optimizer)
    dataloader = DataLoader(Windows("train", 48 * 2 * 8), batch_size=8, shuffle=True)
    dataloader = fabric.setup_dataloaders(dataloader)

    model.train()
    for step, batch in enumerate(dataloader):
        _, loss = model(*batch)
        fabric.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 8 == 0:
            fabric.print(f"step {step}: loss {loss.item():.4f}")
    val_loss = estimate_loss(model)
    fabric.print(f"val loss {val_loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
