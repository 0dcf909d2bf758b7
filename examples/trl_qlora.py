"""QLoRA by TRL's SFTTrainer over two homes: torchrun --nproc-per-node 2 examples/trl_qlora.py.

Needs `pip install trl peft bitsandbytes`. The base model has 4-bit weights, which are never sent;
its adapters travel after every eight steps, in four bits. The model is a small one with random
weights, made here; take your own by `AutoModelForCausalLM.from_pretrained`.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

import thinwire as tw
from thinwire.integrations.transformers import ThinwireCallback

STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)


def base(folder: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=FOUR_BITS)
    for module in model.modules():  # on a CPU its kernel of evaluation has no backward pass
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="!", pad_token="!")


def main() -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((stdlib / name).read_text() for name in ("argparse.py", "ast.py"))
    data = Dataset.from_list([{"text": text[at : at + 200]} for at in range(0, 80_000, 200)])
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=base(folder),
            args=SFTConfig(
                output_dir=folder, max_steps=40, per_device_train_batch_size=8, learning_rate=1e-2,
                logging_steps=10, save_strategy="no", report_to="none", use_cpu=True,
                disable_tqdm=True, max_length=128,
            ),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            callbacks=[ThinwireCallback(STRATEGY)],  # all that is new
        )  # fmt: skip
        trainer.train()
        if trainer.is_world_process_zero():
            trainer.model.save_pretrained(f"{folder}/adapters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
