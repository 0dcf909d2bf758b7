"""A strategy in the Trainer of transformers, and the same without it: torchrun --nproc-per-node 2
examples/transformers_trainer.py.

Needs `pip install transformers accelerate`. A small GPT-2 reads the standard library; both ways
print the same losses.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_cosine_schedule_with_warmup

import thinwire as tw
from thinwire.integrations.transformers import ThinwireCallback

CONTEXT, STEPS = 64, 40
# low_rank=tw.LowRank(), localsgd=tw.LocalSGD(k_steps=8), lamb=tw.LAMB() and none at all work too
STRATEGY = tw.DistributedStrategy(
    dgc=tw.DGC(rampup_step=20, sparsity=(0.75, 0.9375, 0.99), min_numel=4096)
)


class Text(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        raw = b"".join(path.read_bytes() for path in sources[:40])
        pieces = len(raw) // CONTEXT
        self.pieces = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: pieces * CONTEXT]
        self.pieces = self.pieces.long().view(pieces, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def trainer(folder: str) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=3e-3, lr_scheduler_type="cosine",
        max_grad_norm=1.0, logging_steps=1, save_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True, log_level="error", dataloader_pin_memory=False,
    )  # fmt: skip
    callback = ThinwireCallback(STRATEGY)  # all that is new
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Text(), callbacks=[callback])


def by_hand(given: Trainer) -> list[float]:
    """The Trainer's model, optimizer, batches and rates in a loop without it."""
    model, optimizer = given.model, given.create_optimizer()
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
    engine = STRATEGY.prepare(model, optimizer, grad_clip=tw.ClipByGlobalNorm(1.0))
    batches, losses = iter(given.get_train_dataloader()), []
    for _ in range(STEPS):
        group, items = given.get_batch_samples(batches, 2, torch.device("cpu"))
        loss = torch.zeros(())
        for batch in group:
            share = model(**batch, num_items_in_batch=items).loss * given.args.world_size
            share.backward()
            loss += share.detach()
        engine.apply_gradients(loss)  # one exchange for both batches
        schedule.step()
        model.zero_grad()
        losses.append(float(engine.mean_loss(loss)))
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(folder)
        one.train()
        theirs = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        ours = by_hand(trainer(folder))
    if one.is_world_process_zero():
        for step in (0, 9, 19, 29, 39):
            print(
                f"step {step + 1}: loss {theirs[step]:.6f} by the Trainer, {ours[step]:.6f} by hand"
            )
    assert max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
