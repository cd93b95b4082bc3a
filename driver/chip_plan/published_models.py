"""Sizes of models whose files a plan need not fetch, by their names on the Hugging Face Hub."""

import dataclasses
import pathlib
from typing import Any

from driver.config.load_config import ConfigError
from driver.config.plan import checked
from models.config import ModelConfig, RopeConfig
from models.files.checkpoint import read_model_config
from models.files.hf_config import from_hf
from models.files.hf_folder import read_json

_QWEN25: dict[str, Any] = dict(
    model_type="qwen2",
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position_embeddings=32768,
    qkv_bias=True,
)
QWEN25_3B = ModelConfig(
    **_QWEN25,
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    tie_word_embeddings=True,
)
QWEN25_1_5B = ModelConfig(
    **_QWEN25,
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    tie_word_embeddings=True,
)
QWEN25_0_5B = ModelConfig(
    **{**_QWEN25, "head_dim": 64},
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    tie_word_embeddings=True,
)
QWEN25_7B = ModelConfig(
    **_QWEN25,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    tie_word_embeddings=False,
)
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN25_0_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN25_1_5B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN25_3B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25_7B,
}


def model_of(path: str, config_file: str | None = None, layers: int | None = None) -> ModelConfig:
    """The sizes of a run's model: of a file, of PUBLISHED, or of the model's own config.json.

    Args:
        path: model.path.
        config_file: a config.json that stands for the model's.
        layers: cuts the model to its first ones; None leaves it whole.

    Raises:
        ConfigError: if there is no such model, with what to give instead.
    """
    try:
        if config_file is not None:
            model = from_hf(read_json(pathlib.Path(config_file)))
        else:
            model = PUBLISHED.get(path) or read_model_config(path)
    except (OSError, ValueError) as error:
        asked = f"--model-config {config_file}" if config_file else f"model.path={path}"
        raise ConfigError(
            f"{asked}: {error}; a plan needs the model's config.json alone: give it with "
            "--model-config FILE"
        ) from error
    return checked(with_layers, model, layers)


def teacher_of(path: str) -> ModelConfig:
    """The sizes of a teacher: of PUBLISHED, or of its own config.json.

    Args:
        path: algorithm.distillation.teacher.

    Raises:
        ConfigError: if there is no such model.
    """
    known = PUBLISHED.get(path)
    return known or checked(read_model_config, path, about="algorithm.distillation.teacher")


def with_layers(model: ModelConfig, layers: int | None) -> ModelConfig:
    """The model cut to its first layers; None leaves it whole.

    Raises:
        ValueError: if the model has fewer.
    """
    if layers is None:
        return model
    if not 1 <= layers <= model.num_layers:
        raise ValueError(
            f"--layers {layers} must be from 1 to the model's {model.num_layers} layers"
        )
    return dataclasses.replace(model, num_layers=layers)
