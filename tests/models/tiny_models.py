"""Small models of every family, and folders that hold them."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.files.checkpoint import expected_shapes

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

HF_CONFIGS = {
    "qwen2": {"model_type": "qwen2", **SIZES, "rope_theta": 1e6},
    "qwen2-tied": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen2-yarn": {"model_type": "qwen2", **SIZES, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16, "rope_theta": 1e6},
    "llama": {"model_type": "llama", **SIZES},
    "llama3-rope": {"model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama-linear": {
        "model_type": "llama",
        **SIZES,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama-biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
}


def random_named(config: ModelConfig, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Values of which none is neutral: biases are not 0 and norms are not 1."""
    random = np.random.default_rng(seed)

    def tensor(name, shape):
        values = random.normal(0, 0.3 if len(shape) == 1 else 0.2, shape)
        return (values + ("norm" in name)).astype(np.float32).astype(dtype)

    return {name: tensor(name, shape) for name, shape in expected_shapes(config).items()}


def write_folder(
    folder: pathlib.Path, hf_config: dict, shards: dict[str, dict[str, np.ndarray]]
) -> pathlib.Path:
    """An HF folder written with the safetensors package; more than one shard gets an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    for file, named in shards.items():
        save_file(named, folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, named in shards.items() for name in named}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def split(named: dict[str, np.ndarray], parts: int) -> dict[str, dict[str, np.ndarray]]:
    names = list(named)
    return {
        f"model-{i + 1:05d}-of-{parts:05d}.safetensors": {n: named[n] for n in names[i::parts]}
        for i in range(parts)
    }
