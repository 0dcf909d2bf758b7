"""In the manner of PEFT's examples, LoRA on a small GPT-2 made here: torchrun --nproc-per-node 2
examples/recipes/peft_lora.py.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model
from small_gpt import CONTEXT, Windows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

num_steps, lr, batch_size = 48, 2e-2, 8


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
    )  # fmt: skip
    model = get_peft_model(GPT2LMHeadModel(config), peft_config)
    train_dataset = Windows("train", num_steps * batch_size * dist.get_world_size())
    sampler = DistributedSampler(train_dataset)
    train_dataloader = DataLoader(train_dataset, batch_size=batch_size, sampler=sampler)
    eval_dataloader = DataLoader(Windows("val", 128), batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
    model = DistributedDataParallel(model)

    model.train()
    for step, (input_ids, _) in enumerate(train_dataloader):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for ids, _ in eval_dataloader]
    if dist.get_rank() == 0:
        print(f"val loss {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
