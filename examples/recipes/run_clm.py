"""In the manner of Transformers' run_clm.py, with a small GPT-2 made here: torchrun
--nproc-per-node 2 examples/recipes/run_clm.py.
"""

import tempfile
from dataclasses import dataclass

import torch
from small_gpt import CONTEXT, Windows
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    hidden_size: int = 64
    num_layers: int = 2


class Grouped(Dataset):
    """Blocks of the text, as `group_texts` makes them."""

    def __init__(self, split: str, most: int) -> None:
        self.windows = Windows(split, most)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        inputs, _ = self.windows[i]
        return {"input_ids": inputs, "labels": inputs}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            f"--output_dir {folder} --max_steps 48 --per_device_train_batch_size 8 "
            "--learning_rate 6e-3 --lr_scheduler_type cosine --max_grad_norm 1.0 "
            "--logging_steps 8 --save_strategy no --use_cpu --report_to none --disable_tqdm true "
            "--dataloader_pin_memory false"
        )
        model_args, training_args = parser.parse_args_into_dataclasses(arguments.split())
        set_seed(training_args.seed)
        config = GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=model_args.hidden_size,
            n_layer=model_args.num_layers, n_head=4, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=Grouped("train", 4096),
            eval_dataset=Grouped("val", 128),
        )
        trainer.train()
        metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"val loss {metrics['eval_loss']:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
