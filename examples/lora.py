"""LoRA over a thin line: torchrun --nproc-per-node 2 examples/lora.py.

Needs `pip install peft transformers`. Only the adapters train, so only they travel, and
`engine.save(..., frozen=False)` writes only them. The base model is a small one with random
weights, made here; take your own by `AutoModelForCausalLM.from_pretrained`.
"""

import inspect
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import thinwire as tw

STEPS, BATCH, LENGTH = 64, 8, 64
STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))


def adapted() -> torch.nn.Module:
    """The frozen base model, the same on all ranks, with adapters that train."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    return get_peft_model(base, config)


def engine_of(model: torch.nn.Module) -> tw.Engine:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return STRATEGY.prepare(model, torch.optim.AdamW(trained, lr=1e-2))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = torch.tensor(list(inspect.getsource(json.decoder).encode()))
    chance = torch.Generator().manual_seed(rank)  # each rank draws batches of its own

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chance).tolist()
        tokens = torch.stack([text[at : at + LENGTH] for at in starts]).clamp(max=255)
        return model(input_ids=tokens, labels=tokens).loss

    model = adapted()
    engine = engine_of(model)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        engine.minimize(loss)
        losses.append(float(loss.detach()))
    engine.flush()
    whole = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sent = engine.stats()["bytes_sent"]

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    saved = engine.save(folder[0], frozen=False)
    again = engine_of(fresh := adapted())  # the base weights are made, or downloaded, again
    again.load(folder[0])
    equal = all(map(torch.equal, model.parameters(), fresh.parameters()))
    if rank == 0:
        size = sum(path.stat().st_size for path in Path(saved).iterdir())
        print(f"loss {losses[0]:.2f} -> {sum(losses[-8:]) / 8:.2f}; equal after loading: {equal}")
        print(f"{trained:,} of {whole:,} parameters train; {sent / STEPS:,.0f} bytes sent a step")
        print(f"{4 * whole / (sent / STEPS):,.0f} times fewer bytes than dense, whole gradients")
        print(f"the checkpoint has {size:,} bytes, the base model {4 * whole:,}")
    assert equal
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
