"""A model from one GGUF file: config from its metadata, tensors dequantised to float32.

Covers the architectures llama, qwen2 and qwen3. Converters interleave the rows of llama's query
and key matrices (pairs 2i, 2i+1 of a head) where Hugging Face keeps them in halves; here they are
put back. Qwen's are stored as they are.

Dimension key:
    N: heads of one projection
    H: head size
    D: model width
"""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
from gguf.quants import dequantize

from models.config import ModelConfig
from models.files.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from models.files.hf_config import from_hf
from models.files.safetensors_file import DTYPES
from models.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0)
"""Of Llama 3.1 and 3.2. A GGUF file stores llama3 scaling as one divisor per pair."""
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "rope.scaling.alpha",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An opened GGUF model; tensors are read on demand."""

    path: pathlib.Path
    config: ModelConfig
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    """By Hugging Face's names."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face's names."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def stored_dtype(self) -> np.dtype:
        """Of the matrices where all are of one float type; bfloat16 where they are quantised."""
        kinds = {t.quantization.name for t in self.tensors.values() if len(t.shape) > 1}
        return DTYPES.get(kinds.pop(), DTYPES["BF16"]) if len(kinds) == 1 else DTYPES["BF16"]

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, rows in Hugging Face's order."""
        tensor = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", offset=tensor.start, shape=(tensor.size,))
        values = dequantize(np.asarray(raw).reshape(*tensor.shape[:-1], -1), tensor.quantization)
        values = np.asarray(values, np.float32).reshape(tensor.shape)
        if self.config.model_type != "llama":
            return values
        if ".q_proj." in name:
            return _halves_from_pairs(values, self.config.num_heads)
        if ".k_proj." in name:
            return _halves_from_pairs(values, self.config.num_kv_heads)
        return values


def open_gguf(path: pathlib.Path) -> GgufFile:
    """Reads the header of a GGUF model.

    Raises:
        ValueError: if the file is damaged, or is of an architecture or has a feature that is not
            supported; names the file and the key.
    """
    stat = path.stat()
    return _open(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)  # one start reads the same header for config, weights, tokenizer
def _open(path: pathlib.Path, size: int, modified_ns: int) -> GgufFile:
    header = read_gguf_header(path)
    tensors = {
        _hf_name(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_FACTORS
    }
    try:
        config = from_hf(_hf_config(header))
        if _ROPE_FACTORS in header.tensors:
            config = _with_llama3_scaling(path, header, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return GgufFile(path, config, header.metadata, tensors)


def _hf_name(name: str) -> str:
    """Unknown names stay as they are, and are then reported as extra."""
    if name in _TOP:
        return _TOP[name]
    part = name.split(".")
    if len(part) == 4 and part[0] == "blk" and part[2] in _LAYER:
        return f"model.layers.{part[1]}.{_LAYER[part[2]]}.{part[3]}"
    return name


def _hf_config(header: GgufHeader) -> dict[str, Any]:
    """What a config.json of the same model would say."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={architecture!r} is not supported: known are "
            f"{', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    for key in _UNSUPPORTED_KEYS:
        if get(key):
            raise ValueError(f"{architecture}.{key}={get(key)} is not supported")
    heads, width = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        raise ValueError(
            f"{architecture}.attention.head_count={heads!r} and embedding_length={width!r} must "
            "be positive integers"
        )
    head_dim = get("attention.key_length", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key}={get(key)} must equal the head size {head_dim}")
    if "token_embd.weight" not in header.tensors:
        raise ValueError("the tensor token_embd.weight is missing")
    epsilon = get("attention.layer_norm_rms_epsilon", 1e-6)
    return {
        "model_type": architecture,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # was stored as float32
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(get),
    }


def _rope_scaling(get) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "linear" if get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": get("rope.scaling.factor", get("rope.scale_linear")),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _with_llama3_scaling(
    path: pathlib.Path, header: GgufHeader, config: ModelConfig
) -> ModelConfig:
    """Finds the llama3 scaling whose divisors the file stores."""
    tensor = header.tensors[_ROPE_FACTORS]
    raw = np.memmap(path, np.uint8, "r", offset=tensor.start, shape=(tensor.size,))
    stored = np.asarray(dequantize(np.asarray(raw), tensor.quantization), np.float64)
    plain, _ = inverse_frequencies(config)
    for factor in _LLAMA3_FACTORS:
        rope = dataclasses.replace(
            config.rope, kind="llama3", factor=factor, original_max_position_embeddings=8192
        )
        scaled = dataclasses.replace(config, rope=rope)
        divisors = plain / inverse_frequencies(scaled)[0]
        if stored.shape == divisors.shape and np.allclose(stored, divisors, rtol=1e-4):
            return scaled
    raise ValueError(
        f"{_ROPE_FACTORS} holds divisors up to {stored.max():g} that are not those of llama3 "
        f"scaling by {' or '.join(f'{factor:g}' for factor in _LLAMA3_FACTORS)}"
    )


def _halves_from_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i + j of a head (pair i, member j) goes to row j H/2 + i; [N H, D] or [N H]."""
    N, H = num_heads, rows.shape[0] // num_heads
    return rows.reshape(N, H // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
