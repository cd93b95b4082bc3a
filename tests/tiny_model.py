"""A model folder of a few thousand random parameters with a tokenizer of bytes, for tests."""

import pathlib

import jax
import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from models.config import ModelConfig
from models.files.checkpoint import save_model, to_named
from models.load_tokenizer import load_tokenizer
from models.transformer import init_params

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<s>' + message['role'] + ':' + message['content'] + '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def write_tiny_model(folder: pathlib.Path, *, seed: int = 0, **changes) -> pathlib.Path:
    """Writes an HF folder that service, tests and transformers can load; returns it."""
    bytes_only = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(bytes_only)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    )
    backend.chat_template = CHAT_TEMPLATE
    parts = folder.parent / f"{folder.name}-tokenizer"
    parts.mkdir(parents=True)
    backend.save_pretrained(str(parts))
    settings = dict(
        model_type="qwen2",
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    config = ModelConfig(**{**settings, **changes})
    init = jax.jit(init_params, static_argnums=1)  # else a program for each of its operations
    params = jax.tree.map(np.asarray, init(jax.random.key(seed), config))
    save_model(folder, config, to_named(params, config), load_tokenizer(str(parts)))
    return folder
