"""Adapters on quantized base models of bitsandbytes and torchao, over ranks and members."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.integrations.frameworks import losses_of, trainer_of, trainers
from tests.integrations.packages import as_under_torchrun, needs
from tests.members.places import meeting_place
from tests.members.training import TIMEOUT_S, wait_for
from tests.ranks import Pool, Raised
from thinwire.errors import CheckpointError, ThinwireError

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(400),
    *map(needs, ("bitsandbytes", "peft", "torchao")),
]
LOCAL = tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(4))
STRATEGY = tw.DistributedStrategy(localsgd=LOCAL)
KINDS = ("nf4", "llm.int8", "torchao int8", "torchao int4")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, ranks: Pool) -> list[Path]:
    """Two base models of other weights and equal shapes."""
    folders = [tmp_path_factory.mktemp("base") for _ in range(2)]
    ranks.run(write, folders, size=0)
    return folders


def write(rank: int, size: int, folders: list[Path]) -> None:
    with as_under_torchrun(rank, 1):
        from transformers import LlamaConfig, LlamaForCausalLM

        for seed, folder in enumerate(folders):
            torch.manual_seed(seed)
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            config = LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes)
            LlamaForCausalLM(config).save_pretrained(folder)


def quantized(folder: Path, kind: str) -> Any:
    """The base model as its users load it."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    config: Any
    if kind == "nf4":
        types = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **types)
    elif kind == "llm.int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig

        ways = {"int8": Int8WeightOnlyConfig(version=2), "int4": IntxWeightOnlyConfig(torch.int4)}
        config = TorchAoConfig(ways[kind.split()[1]])
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    )
    for module in model.modules():  # the kernel of evaluation has no backward pass on a CPU
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def adapted(folder: Path, kind: str, seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    base = quantized(folder, kind)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).train()


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(model: Any, chance: torch.Generator) -> Tensor:
    tokens = torch.randint(64, (4, 16), generator=chance)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(16)[None]).logits
    return logits


def engine_of(model: nn.Module) -> tw.Engine:
    return STRATEGY.prepare(model, torch.optim.AdamW(adapters(model).items(), lr=1e-2))


def trained(rank: int, size: int, bases: list[Path], kind: str, folder: Path) -> dict[str, Any]:
    with as_under_torchrun(rank, size):
        model = adapted(bases[0], kind, seed=rank)
        frozen = hashed(model)
        engine = engine_of(model)
        chance = torch.Generator().manual_seed(rank)
        for _ in range(8):
            engine.minimize(loss_of(model, chance))
        engine.flush()
        stats = engine.stats()
        alone = engine.save(folder / "adapters", frozen=False)
        whole = engine.save(folder / "all")
        only = engine.save(folder / "model", only="model")
        if rank == 0:
            model.save_pretrained(folder / "peft")
        for checkpoint in (alone, whole):
            again = engine_of(fresh := adapted(bases[0], kind, seed=9))
            again.load(checkpoint.parent)
            assert torch.equal(answers(fresh), answers(model))
            again.close()
        other = engine_of(fresh := adapted(bases[0], kind, seed=9))
        other.load_parameters(only.parent)
        assert torch.equal(answers(fresh), answers(model))
        other.close()
        other = engine_of(adapted(bases[1], kind))
        for checkpoint in (alone, whole):
            with pytest.raises(CheckpointError):
                other.load(checkpoint.parent)
        with pytest.raises(CheckpointError, match=r"q_proj.*the same base model"):
            other.load_parameters(only.parent)
        other.close()
        engine.close()
        return {
            "adapters": [p.detach() for p in adapters(model).values()],
            "frozen": hashed(model) == frozen,
            "answers": answers(model),
            "stats": stats,
            "size": sum(path.stat().st_size for path in alone.iterdir()),
        }


def hashed(model: nn.Module) -> str:
    """Of all that the base model consists of, written as torch writes it."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if "lora" not in name and isinstance(value, Tensor):
            plain = value.dequantize() if hasattr(value, "qdata") else value
            found.update(name.encode() + bytes(plain.contiguous().flatten().view(torch.uint8)))
    return found.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_quantized_weights_stay(
    ranks: Pool, bases: list[Path], kind: str, tmp_path: Path
) -> None:
    first, second = ranks.run(trained, bases, kind, tmp_path)
    assert first["frozen"] and second["frozen"]
    assert torch.equal(first["answers"], second["answers"])
    assert all(map(torch.equal, first["adapters"], second["adapters"]))
    numel = sum(p.numel() for p in first["adapters"])
    assert first["stats"]["bytes_dense"] == 4 * numel * 8
    assert first["stats"]["bytes_sent"] < 2 * (numel / 2 + 4096)
    assert torch.equal(ranks.run(read, bases[0], kind, tmp_path, size=0)[0], first["answers"])


def read(rank: int, size: int, base: Path, kind: str, folder: Path) -> Tensor:
    """What an adapter answers that was written by `save_pretrained`."""
    with as_under_torchrun(0, 1):
        from peft import PeftModel

        return answers(PeftModel.from_pretrained(quantized(base, kind), folder / "peft").train())


def prepared(rank: int, size: int, bases: list[Path], kind: str, local: bool) -> None:
    with as_under_torchrun(rank, size):
        model = adapted(bases[rank], kind)
        optimizer = torch.optim.AdamW(adapters(model).items(), lr=1e-2)
        if local:
            with tw.local_sgd(model, optimizer, LOCAL):
                pass
        else:
            tw.DistributedStrategy().prepare(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "local"), [("nf4", True), ("llm.int8", False), ("torchao int4", False)]
)
def test_ranks_with_other_quantized_weights_are_refused(
    ranks: Pool, bases: list[Path], kind: str, local: bool
) -> None:
    found = ranks.run(prepared, bases, kind, local, expect_errors=True)
    for answer in found:
        assert isinstance(answer, Raised)
        assert answer.type_name == "Mismatch"
        assert "q_proj" in answer.text


def member(
    rank: int, size: int, address: str, bases: list[Path], others: int, flags: list[Path]
) -> Any:
    """The first two train; the last one comes later, with the base model number `others`."""
    with as_under_torchrun(rank, size):
        joins = rank == size - 1
        model = adapted(bases[others if joins else 0], "nf4", seed=rank)
        optimizer = torch.optim.AdamW(adapters(model).items(), lr=1e-2)
        chance = torch.Generator().manual_seed(rank)
        wait_for(str(flags[0]) if joins else "")
        options = {"run": "qlora", "timeout": TIMEOUT_S, "start_members": 2}
        with tw.join(address, **options) as members:
            try:
                with tw.local_sgd(model, optimizer, LOCAL, members=members) as sync:
                    entered = sync.step
                    flags[1].touch() if joins else None
                    end = 10_000
                    while sync.step < end:
                        optimizer.zero_grad()
                        loss_of(model, chance).backward()
                        optimizer.step()
                        if sync.step == 4:
                            flags[0].touch()
                        if sync.synced and flags[1].exists() and members.size == 3 - others:
                            end = min(end, sync.step + 8)
            except ThinwireError as error:
                flags[1].touch()
                return str(error)
        return entered, sync.step, hashed(model), [p.detach() for p in adapters(model).values()]


@pytest.mark.parametrize("others", [0, 1])
def test_a_joiner_gets_the_adapters_and_needs_the_same_quantized_weights(
    ranks: Pool, bases: list[Path], others: int, tmp_path: Path
) -> None:
    flags = [tmp_path / "go", tmp_path / "joined"]
    with meeting_place(None) as address:
        first, second, third = ranks.run(member, address, bases, others, flags, size=3, group=False)
    assert all(map(torch.equal, first[3], second[3]))
    if others:
        assert "q_proj" in third
    else:
        assert third[0] > 0
        assert all(map(torch.equal, first[3], third[3]))
        assert third[2] == first[2]


def under_trainer(
    rank: int, size: int, bases: list[Path], kind: str, folder: Path, resumes: bool
) -> Any:
    with trainers(rank, size):
        saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
        saving |= {"eval_strategy": "steps", "eval_steps": 4}
        trainer, callback = trainer_of(
            STRATEGY, folder, model=adapted(bases[0], kind, seed=rank), **saving
        )
        start = str(folder / "checkpoint-4") if resumes else None
        trainer.train(resume_from_checkpoint=start)
        found = [p.detach() for p in adapters(trainer.model).values()]
        return found, losses_of(trainer), callback.engine.stats()


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_the_trainer_trains_and_resumes_on_quantized_weights(
    ranks: Pool, bases: list[Path], kind: str, tmp_path: Path
) -> None:
    first, second = ranks.run(under_trainer, bases, kind, tmp_path, False)
    again = ranks.run(under_trainer, bases, kind, tmp_path, True)
    for one in (second, *again):
        assert all(map(torch.equal, first[0], one[0]))
    assert first[1][-1] < first[1][0]
    assert first[2]["averagings"] == 2
