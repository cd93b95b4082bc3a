"""config.json of Hugging Face <-> ModelConfig; what the model does not compute is refused.

Missing optional keys get Hugging Face's default for that model_type. Of these, a missing
`tie_word_embeddings` (false for every family here) is reported, since published folders do rely
on other defaults.
"""

import functools
import logging
from collections.abc import Collection, Mapping
from typing import Any

from models.config import ModelConfig, RopeConfig
from models.rope import ROPE_KINDS

log = logging.getLogger(__name__)

MODEL_TYPES = ("qwen2", "qwen3", "llama")
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_DEFAULT_MAX_POSITIONS = {"qwen2": 32768, "qwen3": 32768, "llama": 2048}
_QWEN3_HEAD_DIM = 128
_DEFAULT_THETA = 10_000.0

_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_ROPE_KEYS = {
    *_ROPE_NUMBERS,
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "truncate",
    "partial_rotary_factor",
}
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a config.json.

    Args:
        config: as parsed; `rope_parameters` of transformers 5 and the older `rope_theta` with
            `rope_scaling` are both understood.

    Raises:
        ValueError: if a needed key is absent or has a value of the wrong kind, or if the config
            asks for something that this model does not compute; names key, value and rule.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: known are {', '.join(MODEL_TYPES)}"
        )
    num_layers = _positive_int(config, "num_hidden_layers")
    _refuse_unsupported(config, model_type, num_layers)
    hidden_size = _positive_int(config, "hidden_size")
    num_heads = _positive_int(config, "num_attention_heads")
    attention_bias = _flag(config, "attention_bias", model_type == "qwen2")
    max_positions = _positive_int(
        config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[model_type]
    )
    return ModelConfig(
        model_type=model_type,
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, model_type, num_heads),
        head_dim=_head_dim(config, model_type, hidden_size, num_heads),
        rms_norm_eps=_positive_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=_tied(config, model_type),
        qkv_bias=attention_bias,
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=_flag(config, "mlp_bias", False) if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
    )


def to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Content of a config.json that transformers 4 and 5 and `from_hf` read alike.

    Args:
        dtype: `float32`, `bfloat16` or `float16`: what the tensors beside it are stored in.

    Raises:
        ValueError: if the switches of the config are not those of its model_type.
    """
    _check_expressible(config)
    hf = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "dtype": dtype,
        **_rope_to_hf(config.rope),
    }
    if config.model_type == "llama":
        hf |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    else:
        hf |= {"use_sliding_window": False}
    if config.model_type == "qwen3":
        hf |= {"attention_bias": config.qkv_bias}
    return hf


def carry_over(
    original: Mapping[str, Any], made: Mapping[str, Any], dtypes: Collection[str]
) -> dict[str, Any]:
    """The config.json that a model came with, for its export.

    Args:
        original: its content; empty where there was none.
        made: as `to_hf` gives it: stands in for what the original leaves out and transformers 4 or
            5 needs, such as the other spelling of the rotary embedding.
        dtypes: types of the exported tensors. A type that the original names stays where a tensor
            has it.
    """
    spelled = [key for key in ("dtype", "torch_dtype") if original.get(key) is not None]
    lacking = {key: value for key, value in made.items() if original.get(key) is None}
    if spelled:
        lacking.pop("dtype", None)
        lacking |= {key: made["dtype"] for key in spelled if original[key] not in dtypes}
    return {**original, **lacking}


def _refuse_unsupported(config: Mapping[str, Any], model_type: str, num_layers: int) -> None:
    """Features that would change the result and that this model does not compute."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported: only 'silu' is")
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is set: quantised safetensors are not supported; "
            "use the unquantised folder, or a GGUF file"
        )
    dropout = config.get("attention_dropout") or 0
    if dropout:
        raise ValueError(f"attention_dropout={dropout!r} is not supported: set it to 0")
    architectures = config.get("architectures") or []
    if architectures and _ARCHITECTURES[model_type] not in architectures:
        raise ValueError(
            f"architectures={list(architectures)} is not supported for {model_type}: "
            f"it must name {_ARCHITECTURES[model_type]}"
        )
    if model_type == "qwen2" and config.get("attention_bias") is False:
        raise ValueError(
            "attention_bias=false is not supported for qwen2, which always has q/k/v biases"
        )
    _refuse_sliding_window(config, model_type, num_layers)


def _refuse_sliding_window(config: Mapping[str, Any], model_type: str, num_layers: int) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            raise ValueError(
                f"layer_types holds {', '.join(others)}: only full_attention is supported"
            )
        return
    window = config.get("sliding_window", None if model_type == "llama" else 4096)
    first_windowed = config.get("max_window_layers", 0 if model_type == "llama" else 28)
    if config.get("use_sliding_window") and window is not None and first_windowed < num_layers:
        raise ValueError(
            f"use_sliding_window=true with sliding_window={window} would affect layers "
            f"{first_windowed}..{num_layers - 1}: only full attention is supported"
        )


def _num_kv_heads(config: Mapping[str, Any], model_type: str, num_heads: int) -> int:
    if "num_key_value_heads" not in config and model_type != "llama":
        raise ValueError(f"num_key_value_heads is missing: {model_type} needs it")
    if config.get("num_key_value_heads") is None:
        return num_heads
    return _positive_int(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], model_type: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive_int(config, "head_dim")
    if model_type == "qwen3":
        return _QWEN3_HEAD_DIM
    if hidden_size % num_heads:
        raise ValueError(
            f"{hidden_size=} must be a multiple of num_attention_heads={num_heads} "
            "where head_dim is not given"
        )
    return hidden_size // num_heads


def _tied(config: Mapping[str, Any], model_type: str) -> bool:
    if config.get("tie_word_embeddings") is None:
        _report_untied_default(model_type)
    return _flag(config, "tie_word_embeddings", False)


@functools.cache  # a process reads one config.json several times and reports it once
def _report_untied_default(model_type: str) -> None:
    log.warning(
        "tie_word_embeddings is not set: taking false, the default for %s; a head of its own "
        "(lm_head.weight) is needed",
        model_type,
    )


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Both spellings may stand side by side as long as they say the same."""
    theta = _positive_number(config, "rope_theta", _DEFAULT_THETA)
    outer_original = config.get("original_max_position_embeddings")
    _refuse_partial_rotary(config)
    found = {
        key: _parse_rope(key, config[key], theta, outer_original or max_positions, max_positions)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    if not found:
        return RopeConfig(theta=theta)
    first, *others = found.values()
    if any(other != first for other in others):
        raise ValueError(
            f"rope_parameters={config['rope_parameters']} and rope_scaling="
            f"{config['rope_scaling']} (rope_theta={theta}) disagree: remove one of them"
        )
    return first


def _parse_rope(
    key: str, values: Any, theta: float, original_length: int, max_positions: int
) -> RopeConfig:
    if not isinstance(values, Mapping):
        raise ValueError(f"{key}={values!r} must be a mapping")
    kind = values.get("rope_type", values.get("type", "default"))
    unknown = sorted(set(values) - _ROPE_KEYS)
    if kind not in ROPE_KINDS:
        raise ValueError(f"unknown rope type {kind!r} in {key}: known are {', '.join(ROPE_KINDS)}")
    if unknown:
        raise ValueError(f"{key} holds keys that are not supported: {', '.join(unknown)}")
    _refuse_partial_rotary(values)
    theta = _positive_number(values, "rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    for needed in _ROPE_REQUIRED[kind]:
        if values.get(needed) is None:
            raise ValueError(f"{key} of rope type {kind!r} needs {needed!r}, got {dict(values)}")
    numbers = {
        name: _positive_number(values, name, None)
        for name in _ROPE_NUMBERS
        if values.get(name) is not None
    }
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=numbers["factor"])
    original = _positive_int(values, "original_max_position_embeddings", original_length)
    numbers.setdefault("factor", max_positions / original)
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        original_max_position_embeddings=original,
        truncate=_flag(values, "truncate", True),
        **numbers,
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ValueError(
            f"{key}: high_freq_factor={rope.high_freq_factor} must exceed "
            f"low_freq_factor={rope.low_freq_factor}"
        )
    return rope


def _refuse_partial_rotary(values: Mapping[str, Any]) -> None:
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={values['partial_rotary_factor']!r} is not supported: "
            "only 1.0 is"
        )


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The new key beside the old ones, for readers of either age."""
    keys_of_kind = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }[rope.kind]
    scaling = {"rope_type": rope.kind}
    for key in keys_of_kind:
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    hf = {"rope_theta": rope.theta, "rope_parameters": {"rope_theta": rope.theta, **scaling}}
    return hf if rope.kind == "default" else {**hf, "rope_scaling": scaling}


def _check_expressible(config: ModelConfig) -> None:
    """A model_type fixes switches; a config.json could not say otherwise."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type={config.model_type!r} is not supported: known are {', '.join(MODEL_TYPES)}"
        )
    is_qwen2, is_qwen3 = config.model_type == "qwen2", config.model_type == "qwen3"
    expected_o_bias = config.qkv_bias and not is_qwen2
    agrees = (
        config.qk_norm == is_qwen3
        and config.o_bias == expected_o_bias
        and (config.qkv_bias or not is_qwen2)
        and (config.model_type == "llama" or not config.mlp_bias)
    )
    if not agrees:
        raise ValueError(
            f"a {config.model_type} config.json cannot express qkv_bias={config.qkv_bias}, "
            f"o_bias={config.o_bias}, mlp_bias={config.mlp_bias}, qk_norm={config.qk_norm}"
        )


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{key} is missing: it must be a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r} must be a positive integer")
    return value


def _positive_number(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{key}={value!r} must be a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return value
