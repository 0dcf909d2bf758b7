"""Members that come and go in the Trainer of transformers: LoRA without torchrun.

Where they meet: thinwire host --run lora --bind 10.0.0.1:29400, which prints a code.
On every machine, now or later: thinwire join -- python examples/members_trainer.py

Kill one, start another one: the rest goes on. Ctrl-C leaves after the running round.
Needs `pip install peft transformers accelerate`. The base model is a small one of random weights.
"""

import os
import signal

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import thinwire as tw
from thinwire.integrations.transformers import ThinwireCallback

STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    if "THINWIRE_CODE" not in os.environ:
        print(__doc__)
        return
    text = torch.frombuffer(bytearray(__doc__.encode() * 40), dtype=torch.uint8).long()
    data = [
        {"input_ids": piece, "labels": piece} for piece in text[: len(text) // 64 * 64].view(-1, 64)
    ]
    arguments = TrainingArguments(
        output_dir="members_trainer", max_steps=64, eval_strategy="steps", eval_steps=16,
        save_steps=32, learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    with tw.join(timeout=20) as members:
        signal.signal(signal.SIGINT, lambda *_: members.leave())
        callback = ThinwireCallback(STRATEGY, members=members)
        options = {"train_dataset": data, "eval_dataset": data[:8], "callbacks": [callback]}
        trainer = Trainer(adapted(), arguments, **options)
        trainer.train()
        trainer.save_model("members_trainer/adapters")  # by the first member
        print(f"step {trainer.state.global_step}: member {members.rank} of {members.size}")


if __name__ == "__main__":
    main()
