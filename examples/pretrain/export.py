"""A checkpoint of train.py as a folder that `transformers` loads, and a sample of it.

pip install transformers
python examples/pretrain/export.py --to exported
python -c "from transformers import pipeline; print(pipeline('text-generation', 'exported')('def'))"
"""

import argparse
from pathlib import Path

import safetensors.torch
from common import arguments, model_of
from data import END
from model import SIZES, continued
from transformers import LlamaConfig, PreTrainedTokenizerFast

import thinwire as tw


def main(args: argparse.Namespace) -> None:
    model, _ = model_of(args)
    size, file = SIZES[args.size], args.to / "model.safetensors"
    args.to.mkdir(parents=True, exist_ok=True)
    tw.checkpoint.export(args.out, file, force=True)
    tensors = safetensors.torch.load_file(file)
    model.load_state_dict(tensors)
    del tensors["lm_head.weight"]  # tied
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(args.data / "tokenizer.json"), eos_token=END
    )
    tokenizer.save_pretrained(args.to)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype=size.dtype,
    ).save_pretrained(args.to)
    sample = continued(model, tokenizer.encode(args.prompt), args.tokens, size.context)
    print(tokenizer.decode(sample))


if __name__ == "__main__":
    parser = arguments(rate=0.0)
    parser.add_argument("--to", type=Path, default=Path("exported"))
    parser.add_argument("--prompt", default="import os\n\n\ndef ")
    parser.add_argument("--tokens", type=int, default=32, help="of the sample")
    main(parser.parse_args())
