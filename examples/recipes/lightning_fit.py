"""In the manner of Lightning's examples, by its Trainer: torchrun --nproc-per-node 2
examples/recipes/lightning_fit.py.
"""

import os

import lightning as L  # noqa: N812  (its name there)
import torch
from small_gpt import GPT, Windows
from torch import Tensor
from torch.utils.data import DataLoader


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        _, loss = self.model(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, loss = self.model(*batch)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=6e-3, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 48)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    L.seed_everything(0)
    train_dataloader = DataLoader(Windows("train", 4096), batch_size=8, shuffle=True)
    val_dataloader = DataLoader(Windows("val", 128), batch_size=32)
    model = LanguageModel()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=48,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_dataloader)
    metrics = trainer.validate(model, val_dataloader, verbose=False)
    trainer.print(f"val loss {metrics[0]['val_loss']:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
