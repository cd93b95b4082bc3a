"""Loads and saves whole models, and maps parameter trees to Hugging Face's flat names and back.

Everything here works on host arrays and is done before a device is asked for. What is missing,
extra, cut or of the wrong shape is an error that names file and tensor. Tensors stored as float16
become float32, since bfloat16 would cut their mantissa; float32 and bfloat16 stay as they are. An
export gives each tensor the type it came in.

Dimension key:
    L: layers
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models.config import ModelConfig
from models.files.carried_files import NOTHING_CARRIED, CarriedFiles
from models.files.gguf import GgufFile, open_gguf
from models.files.hf_config import carry_over, from_hf, to_hf
from models.files.hf_export import appearing_whole, dtype_names, write_json, write_weights
from models.files.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    is_gguf,
    locate,
    read_json,
    tensor_table,
)
from models.files.safetensors_file import DTYPES, TensorEntry, map_tensor
from models.transformer import Params

log = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_NAMES_IN_MESSAGE = 12
_ROWS_AT_ONCE = 8192
_VALUES_AT_ONCE = 2**22
_EXPONENT_BITS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


class SavesFiles(Protocol):
    """What `save_model` needs of a tokenizer."""

    stop_ids: frozenset[int]
    pad_id: int
    bos_id: int | None

    def save(self, folder: pathlib.Path) -> None:
        """Writes the tokenizer's files into an existing folder."""
        ...


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model in host memory; large tensors may be views of its files."""

    config: ModelConfig
    params: Params
    """numpy arrays, float32 or bfloat16, with stacked layers."""
    folder: pathlib.Path | None
    """The HF folder, or None where the model came from one GGUF file."""
    kind: str
    """`folder` or `gguf`."""
    stored_dtypes: Mapping[str, np.dtype]
    """Type of every tensor where it came from, by Hugging Face's name: float32, bfloat16 or
    float16. That of a quantised file is bfloat16."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and shape of every tensor that the model reads."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        for leaf, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{i}.{leaf}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": ((query, D), config.qkv_bias),
        "self_attn.k_proj": ((key_value, D), config.qkv_bias),
        "self_attn.v_proj": ((key_value, D), config.qkv_bias),
        "self_attn.o_proj": ((D, query), config.o_bias),
        "mlp.gate_proj": ((F, D), config.mlp_bias),
        "mlp.up_proj": ((F, D), config.mlp_bias),
        "mlp.down_proj": ((D, F), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,)}
    for name, (shape, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (D,)
    return shapes


def to_named(params: Params, config: ModelConfig) -> dict[str, Any]:
    """The tree as flat Hugging Face names, layers one by one; numpy leaves become views.

    Args:
        params: numpy or jax leaves, layers stacked or listed.

    Raises:
        ValueError: if the tree's names or shapes are not the config's.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        if keys[0] == "lm_head":
            named[".".join(keys)] = leaf
        elif keys[0] != "layers" or isinstance(params["layers"], list):
            named["model." + ".".join(keys)] = leaf
        else:
            for i in range(leaf.shape[0]):
                named[f"model.layers.{i}.{'.'.join(keys[1:])}"] = leaf[i]
    _check_shapes({name: leaf.shape for name, leaf in named.items()}, config, "the tree")
    return {name: named[name] for name in expected_shapes(config)}


def from_named(named: Mapping[str, Any], config: ModelConfig, *, stacked: bool) -> Params:
    """The parameter tree of flat Hugging Face names: the inverse of `to_named`.

    Args:
        named: numpy or jax arrays; float16 becomes float32.
        stacked: whether layers become one tree with a leading layer axis (copied once), or a list
            of trees (not copied).

    Raises:
        ValueError: naming the tensors that are missing, extra, or of the wrong shape.
    """
    _check_shapes({name: array.shape for name, array in named.items()}, config, "the tensors")
    return _build(named.__getitem__, config, stacked=stacked)


def _build(read: Callable[[str], Any], config: ModelConfig, *, stacked: bool) -> Params:
    """Reads each tensor once, leaf by leaf, so that a lazy reader holds one leaf at a time."""
    L = config.num_layers
    params: Params = {"embed_tokens": {"weight": _widened(read(EMBEDDING))}}
    if stacked:
        params["layers"] = {}
        for leaf in _layer_shapes(config):
            arrays = [read(f"model.layers.{i}.{leaf}") for i in range(L)]
            _insert(params["layers"], leaf, _stack(arrays))
    else:
        params["layers"] = [{} for _ in range(L)]
        for i, layer in enumerate(params["layers"]):
            for leaf in _layer_shapes(config):
                _insert(layer, leaf, _widened(read(f"model.layers.{i}.{leaf}")))
    params["norm"] = {"weight": _widened(read("model.norm.weight"))}
    if not config.tie_word_embeddings:
        params["lm_head"] = {"weight": _widened(read(HEAD))}
    return params


def _insert(tree: Params, dotted: str, leaf: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = leaf


def _widened(array: Any) -> Any:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _stack(arrays: list[Any]) -> Any:
    """[L, ..]; float32 where the layers were stored in different types."""
    dtypes = {np.dtype(array.dtype) for array in arrays}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    if dtype == np.float16:
        dtype = np.dtype(np.float32)
    if isinstance(arrays[0], jax.Array):
        return jnp.stack(arrays).astype(dtype)
    out = np.empty((len(arrays), *arrays[0].shape), dtype)
    for i, array in enumerate(arrays):
        out[i] = array
    return out


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    source: str,
    file_of: Mapping[str, Any] | None = None,
) -> None:
    expected = expected_shapes(config)
    _complain(source, "lacks", [name for name in expected if name not in shapes])
    where = file_of or {}
    suffix = lambda name: f" (in {where[name]})" if name in where else ""
    _complain(
        source,
        f"has, beyond what {config.model_type} with this config uses,",
        [f"{name}{suffix(name)}" for name in shapes if name not in expected],
    )
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}{suffix(name)}"
        for name, shape in expected.items()
        if tuple(shapes[name]) != shape
    ]
    _complain(source, "has tensors of the wrong shape:", wrong)


def _complain(source: str, what: str, items: list[str]) -> None:
    if not items:
        return
    shown = ", ".join(items[:_NAMES_IN_MESSAGE])
    more = len(items) - _NAMES_IN_MESSAGE
    hint = ""
    if what == "lacks" and HEAD in items:
        hint = "; tie_word_embeddings is false, so the head must be stored"
    raise ValueError(f"{source} {what} {shown}{f' and {more} more' if more > 0 else ''}{hint}")


def read_model_config(path: str) -> ModelConfig:
    """The model's sizes, from config.json or GGUF metadata alone."""
    place = locate(path, weights=False)
    return open_gguf(place).config if is_gguf(place) else from_hf(read_json(place / CONFIG))


def check_model_files(path: str) -> None:
    """Checks that a model is there and complete, without reading tensor data.

    A hub id's files are fetched for it: what the check accepts, the run finds.

    Raises:
        ValueError: naming the file and the tensors at fault.
    """
    read_stored_form(path)


def read_stored_form(path: str) -> tuple[ModelConfig, dict[str, np.dtype]]:
    """A model's sizes, and the type of each tensor as `LoadedModel.stored_dtypes` has it, without
    reading tensor data.

    Raises:
        ValueError: as `check_model_files`.
    """
    place = locate(path, weights=True)
    if is_gguf(place):
        file = _checked_gguf(place)
        return file.config, dict.fromkeys(expected_shapes(file.config), file.stored_dtype)
    config, table = _checked_folder(place)
    return config, _stored_dtypes(config, table)


def _stored_dtypes(config: ModelConfig, table: dict[str, TensorEntry]) -> dict[str, np.dtype]:
    return {name: table[name].dtype for name in expected_shapes(config)}


def load_model(path: str) -> LoadedModel:
    """Reads config and weights into host memory; checks all headers first, and every value.

    Args:
        path: HF folder, .gguf file, or hub id.

    Raises:
        ValueError: naming the file and the tensors at fault, such as one that holds a NaN.
    """
    place = locate(path, weights=True)
    if is_gguf(place):
        file = _checked_gguf(place)
        params = _build(
            lambda name: _finite(file.read(name), name, place), file.config, stacked=True
        )
        dtypes = dict.fromkeys(expected_shapes(file.config), file.stored_dtype)
        return LoadedModel(file.config, params, None, "gguf", dtypes)
    config, table = _checked_folder(place)
    params = _build(
        lambda name: _finite(map_tensor(table[name]), name, table[name].path), config, stacked=True
    )
    if config.tie_word_embeddings and HEAD in table:
        head, embedding = map_tensor(table[HEAD]), map_tensor(table[EMBEDDING])
        if not _equal(head, embedding):
            log.warning(
                "%s: tie_word_embeddings is true but %s differs from %s: the config wins, the "
                "stored head is not used",
                table[HEAD].path,
                HEAD,
                EMBEDDING,
            )
    return LoadedModel(config, params, place, "folder", _stored_dtypes(config, table))


def _checked_gguf(path: pathlib.Path) -> GgufFile:
    file = open_gguf(path)
    _check_shapes(file.shapes, file.config, str(path))
    return file


def _checked_folder(folder: pathlib.Path) -> tuple[ModelConfig, dict[str, TensorEntry]]:
    """The config and the tensor table of a folder that is complete."""
    config = from_hf(read_json(folder / CONFIG))
    table = tensor_table(folder)
    # Old Llama exports store the rotary frequencies, which follow from the config.
    used = {name: t for name, t in table.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        used.pop(HEAD, None)
    shapes = {name: entry.shape for name, entry in used.items()}
    files = {name: entry.path.name for name, entry in used.items()}
    listing = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
    _check_shapes(shapes, config, str(listing), files)
    return config, table


def _finite(array: np.ndarray, name: str, path: pathlib.Path) -> np.ndarray:
    """The array itself, having looked at every value once, in pieces that fit a cache."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _VALUES_AT_ONCE):
        piece = flat[start : start + _VALUES_AT_ONCE]
        bits = _EXPONENT_BITS.get(piece.dtype)
        # numpy tests 16-bit floats value by value; their exponent bits are five times as fast.
        if bits is None:
            finite = np.isfinite(piece).all()
        else:
            finite = (piece.view(np.uint16) & bits).max() != bits
        if not finite:
            first = start + int(np.argmin(np.isfinite(piece)))
            place = [int(i) for i in np.unravel_index(first, array.shape)]
            raise ValueError(
                f"{path}: {name} holds {float(flat[first])} at {place}: weights must be finite; "
                "fetch or convert the model again"
            )
    return array


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Compared in pieces: a whole comparison of a vocabulary would take as much memory again."""
    return left.shape == right.shape and all(
        np.array_equal(left[row : row + _ROWS_AT_ONCE], right[row : row + _ROWS_AT_ONCE])
        for row in range(0, len(left), _ROWS_AT_ONCE)
    )


def save_model(
    folder: str | os.PathLike,
    config: ModelConfig,
    named: Mapping[str, Any],
    tokenizer: SavesFiles | None = None,
    carried: CarriedFiles = NOTHING_CARRIED,
) -> None:
    """Writes an HF folder that `transformers.AutoModelForCausalLM` loads, whole or not at all.

    The files are written beside the target and renamed at the end; an earlier export under the
    same name is replaced.

    Args:
        named: float32, bfloat16 or float16 arrays under Hugging Face's names (see `to_named`).
        tokenizer: its stop tokens are among the folder's eos; its files are written where none
            are carried.
        carried: of the model that came in; written as it is, with what is lacking.

    Raises:
        ValueError: if names, shapes or dtypes are wrong, or if the folder holds something else.
    """
    _check_shapes({name: array.shape for name, array in named.items()}, config, "the model to save")
    unknown = {np.dtype(array.dtype) for array in named.values()} - set(DTYPES.values())
    if unknown:
        raise ValueError(
            f"tensors to save must be float32, bfloat16 or float16, got {sorted(map(str, unknown))}"
        )
    dtypes = dtype_names(named.values())
    special = {} if tokenizer is None else _special_ids(tokenizer)
    with appearing_whole(pathlib.Path(folder)) as scratch:
        settings = carry_over(carried.config, to_hf(config, dtypes[0]), dtypes)
        write_json(scratch / CONFIG, {**settings, **special, **settings})  # in its own order
        write_json(scratch / GENERATION_CONFIG, carried.generation_config(special))
        write_weights(scratch, {name: named[name] for name in expected_shapes(config)})
        if tokenizer is not None and not carried.tokenizer:
            tokenizer.save(scratch)
        carried.write_files(scratch)


def _special_ids(tokenizer: SavesFiles) -> dict[str, Any]:
    ids = {"eos_token_id": sorted(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    return ids if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id, **ids}
