"""QLoRA over two homes: bytes and losses beside LoRA in wider types, and one machine alone.

python -m research.fine_tuning.qlora            # trains what the results lack, prints the table
python -m research.fine_tuning.qlora --quick    # a few steps, without results

A small Llama learns the next byte of Python's standard library and is loaded again in float32,
bfloat16 or 4 bits (bitsandbytes, NF4). Two ranks with texts of their own train adapters of rank 8
(PEFT) with AdamW: eight local steps, four bits. Alone, one rank trains on its own text only. The
loss is the mean over held-out text of both homes. Needs the packages of .venv-integrations.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.common import Results, markdown
from benchmarks.ranks import on_ranks
from research.fine_tuning.lora import HOMES, SEEDS
from research.fine_tuning.pretrained import arguments

RESULTS = Path(__file__).with_suffix(".jsonl")
STDLIB = Path(tempfile.__file__).parent
SAVED = Path(tempfile.gettempdir()) / "thinwire-research-qlora"
STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))
BATCH, LENGTH, PRETRAINING, STEPS, RATE = 8, 128, 600, 192, 0.01
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "4 bits": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """One fine-tuning of a base model in this type."""

    base: str
    homes: int
    seed: int
    steps: int


@cache
def text_of(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the bytes of a folder's sources: a million to train on, and those held out."""
    files = (path for path in sorted(folder.rglob("*.*")) if path.suffix in (".h", ".py"))
    read, left = [], 1_100_000
    for path in files:
        read.append(path.read_bytes()[:left])
        left -= len(read[-1])
        if not left:
            break
    text = torch.frombuffer(bytearray(b"".join(read)), dtype=torch.uint8).long()
    return text[: len(text) * 10 // 11], text[len(text) * 10 // 11 :]


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chance).tolist()
        yield torch.stack([text[at : at + LENGTH] for at in starts])


def pretrained(folder: Path) -> None:
    """Write the base model, unless it is there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    source = batches(text_of(STDLIB)[0], 0)
    for step in range(PRETRAINING):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / PRETRAINING)
        tokens = next(source)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def adapted(folder: Path, base: str, seed: int) -> nn.Module:
    """Return the base model in this type, with adapters that train in float32."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    given = {"quantization_config": config} if base == "4 bits" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=TYPES[base], **given)
    if given:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    return get_peft_model(model, lora).train()


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Return the mean loss over both homes' held-out text; bitsandbytes rewrites in `eval`."""
    losses = []
    for home in HOMES:
        source = batches(text_of(home)[1], 0)
        losses += [
            float(model(input_ids=x, labels=x).loss) for x, _ in zip(source, range(8), strict=False)
        ]
    return mean(losses)


def train(rank: int, size: int, folder: Path, run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = adapted(folder, run.base, run.seed)
    before = held_out(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
    engine = STRATEGY.prepare(model, optimizer)
    source = batches(text_of(HOMES[rank])[0], 10 * run.seed + rank)
    for step in range(run.steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / run.steps)
        tokens = next(source)
        engine.minimize(model(input_ids=tokens, labels=tokens).loss)
    engine.flush()
    base = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    found = {
        "before": round(before, 5),
        "loss": round(held_out(model), 5),
        "bytes_per_step": round(engine.stats()["bytes_sent"] / run.steps),
        "base_bytes": sum(base.values()) - sum(p.nbytes for _, p in trained),
        "trained": sum(p.numel() for _, p in trained),
    }
    engine.close()
    return found


def measure(run: Run) -> dict[str, Any]:
    pretrained(SAVED)
    return on_ranks(train, run.homes, SAVED, run)[0]


def table(results: Results[Run]) -> list[str]:
    """Return a row per base model and number of homes."""
    rows: list[list[object]] = []
    for homes in (1, 2):
        for base in TYPES:
            found = [results.of(Run(base, homes, seed, STEPS)) for seed in SEEDS]
            losses = [one["loss"] for one in found]
            means = (mean(one["before"] for one in found), mean(losses), stdev(losses))
            sizes = (found[0]["bytes_per_step"], found[0]["base_bytes"])
            rows.append([base, homes, *(f"{value:.3f}" for value in means), *sizes])
    titles = ["base model", "homes", "before", "loss", "std", "bytes a step", "base bytes"]
    return markdown(titles, rows)


def main() -> None:
    """Make what is missing, and print the table."""
    given = arguments(__doc__, RESULTS)
    if given.quick:
        for base in TYPES:
            print(measure(Run(base, 2, 5, 4)))
        return
    print("\n".join(table(Results(given.results, measure))))


if __name__ == "__main__":
    main()
