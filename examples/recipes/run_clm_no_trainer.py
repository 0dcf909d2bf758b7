"""In the manner of Transformers' run_clm_no_trainer.py, by Accelerate: torchrun --nproc-per-node 2
examples/recipes/run_clm_no_trainer.py.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_gpt import CONTEXT, Windows
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    train_dataloader = DataLoader(Windows("train", 48 * 2 * 2 * 8), batch_size=8, shuffle=True)
    eval_dataloader = DataLoader(Windows("val", 128), batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.1)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=0, num_training_steps=48 * accelerator.num_processes
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    model.train()
    for step, (input_ids, _) in enumerate(train_dataloader):
        with accelerator.accumulate(model):
            loss = model(input_ids=input_ids, labels=input_ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if step % 16 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    losses = []
    for input_ids, _ in eval_dataloader:
        with torch.no_grad():
            loss = model(input_ids=input_ids, labels=input_ids).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(input_ids))))
    accelerator.print(f"val loss {torch.cat(losses).mean().item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
