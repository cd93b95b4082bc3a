"""Adapters as folders of PEFT: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained` reads what is written here. What PEFT has beside plain LoRA, and
would change the result where it is left out, is refused by its name.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.adapter import (
    AdapterShape,
    check_rank,
    from_named_adapter,
    projections,
    to_named_adapter,
)
from models.config import ModelConfig
from models.files.hf_export import appearing_whole, write_json
from models.files.hf_folder import ADAPTER, ADAPTER_CONFIG, read_json
from models.files.safetensors_file import TensorEntry, map_tensor, read_header, write_file
from models.transformer import Params

PREFIX = "base_model.model."
"""Of PEFT's tensor names; what follows is named as in models/adapter.py."""
_PLAIN: Mapping[str, Sequence[Any]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
}
"""Keys of adapter_config.json that change the result, and the values that plain LoRA has; other
starts than these, such as PiSSA's, change the model as well."""
_MATRIX = re.compile(r"model\.layers\.(\d+)\.(\w+\.\w+)\.lora_[AB]\.weight")
_SHOWN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter that was read."""

    shape: AdapterShape
    params: Params
    """float32 numpy arrays with stacked layers."""


def write_peft(
    folder: pathlib.Path, adapter: Params, shape: AdapterShape, *, base_model: str
) -> None:
    """Writes an adapter, float32, as PEFT has it, whole or not at all.

    An earlier adapter under the same name is replaced.

    Args:
        adapter: numpy or jax arrays with stacked layers.
        base_model: folder or hub id of the model that it belongs to.

    Raises:
        ValueError: if the folder holds something else.
    """
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(module.rpartition(".")[2] for module in shape.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    named = [
        (PREFIX + name, np.asarray(leaf, np.float32))
        for name, leaf in to_named_adapter(adapter).items()
    ]
    with appearing_whole(folder) as scratch:
        write_json(scratch / ADAPTER_CONFIG, settings)
        write_file(scratch / ADAPTER, named)


def read_peft_shape(folder: pathlib.Path, config: ModelConfig) -> AdapterShape:
    """What adapter an existing folder holds, from its settings and headers alone.

    Args:
        config: of the model that it is for.

    Raises:
        ValueError: if the folder is not complete, is for another model, or is more than plain LoRA.
    """
    return _checked(folder, config)[0]


def load_peft(folder: pathlib.Path, config: ModelConfig) -> PeftAdapter:
    """Reads an adapter.

    Raises:
        ValueError: as `read_peft_shape`, or naming a tensor that is not finite.
    """
    shape, table = _checked(folder, config)
    named = {name: map_tensor(entry) for name, entry in table.items()}
    for name, array in named.items():
        if not np.isfinite(array.astype(np.float32)).all():
            raise ValueError(f"{folder / ADAPTER}: {name} holds a number that is not finite")
    return PeftAdapter(shape=shape, params=from_named_adapter(named, shape, config, stacked=True))


def _checked(
    folder: pathlib.Path, config: ModelConfig
) -> tuple[AdapterShape, dict[str, TensorEntry]]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one that PEFT or an export has written")
    settings = read_json(folder / ADAPTER_CONFIG)
    for key, plain in _PLAIN.items():
        if settings.get(key, plain[0]) not in plain:
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: {key}={settings[key]!r} is more than plain LoRA, "
                f"which has {plain[0]!r}: merge the adapter into its model with PEFT, and train "
                "on that"
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be numbers above "
            "0, r a whole one"
        )
    if not (folder / ADAPTER).is_file():
        raise ValueError(f"{folder} has no {ADAPTER}: save the adapter with safe_serialization")
    table = {
        name.removeprefix(PREFIX): entry for name, entry in read_header(folder / ADAPTER).items()
    }
    found = {match[2] for match in map(_MATRIX.fullmatch, table) if match}
    modules = tuple(module for module in projections(config) if module in found)
    if not modules:
        shown = ", ".join(list(table)[:_SHOWN])
        raise ValueError(
            f"{folder / ADAPTER} holds no adapter of a linear projection of the model, but {shown}"
        )
    shape = AdapterShape(rank=rank, alpha=float(alpha), modules=modules)
    try:
        check_rank(shape, config)
        from_named_adapter(table, shape, config, stacked=False)
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTER}: {error}") from None
    return shape, table
