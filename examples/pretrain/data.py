"""Text into token shards, and shards into batches.

    pip install tokenizers
    python examples/pretrain/data.py --text FOLDER --pattern "*.txt"

trains a byte-level BPE tokenizer, and writes tokens as uint16. Without --text it takes the standard
library of Python. Every 50th file is for validation.
"""

import argparse
import json
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SHARD = 1 << 24
"""Tokens after which a shard ends."""
END = "<|end|>"
"""Token after each file."""


def prepare(text: Path, out: Path, vocabulary: int, pattern: str) -> None:
    """Write tokenizer.json, index.json and the shards into `out`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary > 1 << 16:
        raise SystemExit(f"tokens are uint16: --vocabulary is at most 65536, got {vocabulary}")
    files = [p for p in sorted(text.rglob(pattern)) if "site-packages" not in p.parts]
    if len(files) < 2:
        raise SystemExit(f"{text} has {len(files)} files {pattern!r}; give --text and --pattern")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    validation = files[::50]
    train = [p for p in files if p not in set(validation)]
    tokenizer.train_from_iterator(map(read, train[::4]), trainer)  # a quarter: time, not quality
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    index: dict[str, object] = {"vocabulary": tokenizer.get_vocab_size()}
    for part, paths in (("train", train), ("validation", validation)):
        index[part] = write_shards(tokenizer, paths, out, part)
    (out / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    print(f"{out}: {index}")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def write_shards(tokenizer, files: Sequence[Path], out: Path, part: str) -> dict[str, int]:
    """Tokens of each shard by its name."""
    shards: dict[str, int] = {}
    pending: list[np.ndarray] = []
    for begin in range(0, len(files), 64):
        texts = [read(path) for path in files[begin : begin + 64]]
        pending += [
            np.array([*encoding.ids, tokenizer.token_to_id(END)], dtype=np.uint16)
            for encoding in tokenizer.encode_batch(texts)
        ]
        if sum(map(len, pending)) >= SHARD or begin + 64 >= len(files):
            name, tokens = f"{part}_{len(shards):04d}.bin", np.concatenate(pending)
            tokens.tofile(out / name)
            shards[name], pending = len(tokens), []
            done = min(begin + 64, len(files))
            print(f"{name}: {len(tokens):,} tokens, {done} of {len(files)} files", flush=True)
    return shards


class Windows(Dataset):
    """Windows of `context` tokens and the same one token later, read from the shards when asked."""

    def __init__(self, folder: Path, part: str, context: int) -> None:
        names = json.loads((folder / "index.json").read_text(encoding="utf-8"))[part]
        self.context = context
        self.shards = [np.memmap(folder / name, dtype=np.uint16, mode="r") for name in names]
        self.ends = list(accumulate((len(shard) - 1) // context for shard in self.shards))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        shard = bisect_right(self.ends, number)
        begin = (number - (self.ends[shard - 1] if shard else 0)) * self.context
        tokens = self.shards[shard][begin : begin + self.context + 1].astype(np.int64)
        return torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])


def batches(
    data: Windows, batch: int, sampler: Iterable[int], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of this rank's windows, on the device, epoch after epoch without an end."""
    for x, y in DataLoader(data, batch, sampler=chain.from_iterable(repeat(sampler))):
        yield x.to(device), y.to(device)


def held_out(
    folder: Path, context: int, batch: int, device: torch.device, count: int = 64
) -> list[tuple[Tensor, Tensor]]:
    """At most `count` windows of the validation part, spread over it: always the same batches."""
    data = Windows(folder, "validation", context)
    chosen = range(0, len(data), -(-len(data) // count))
    return [(x.to(device), y.to(device)) for x, y in DataLoader(data, batch, sampler=chosen)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py")
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    prepare(**vars(parser.parse_args()))
