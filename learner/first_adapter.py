"""The adapter that `learner.lora` asks for: its shape, and what it starts as."""

import pathlib

from learner.config import LoraConfig
from models.adapter import AdapterShape, adapter_shape, init_adapter
from models.config import ModelConfig
from models.files.peft_folder import load_peft, read_peft_shape
from models.transformer import Params


def shape_of(lora: LoraConfig, model: ModelConfig) -> AdapterShape:
    """The adapter that a configuration asks for.

    Raises:
        ValueError: if the model has no room for it, with value, rule and fix.
    """
    return adapter_shape(lora.targets, rank=lora.rank, alpha=lora.alpha, config=model)


def first_adapter(lora: LoraConfig, model: ModelConfig, seed: int) -> Params:
    """The adapter that training starts with, float32 on the host: a fresh one, or one from a file.

    Raises:
        ValueError: as `check_first_adapter`.
    """
    shape = shape_of(lora, model)
    if lora.init_from is None:
        return init_adapter(shape, model, seed)
    check_first_adapter(lora, model)
    return load_peft(pathlib.Path(lora.init_from), model).params


def check_first_adapter(lora: LoraConfig, model: ModelConfig) -> None:
    """Checks that the folder of `init_from`, if any, holds an adapter as configured.

    Raises:
        ValueError: if it cannot be read, or is of another shape, with both and the fix.
    """
    if lora.init_from is None:
        return
    wanted, found = shape_of(lora, model), read_peft_shape(pathlib.Path(lora.init_from), model)
    if found != wanted:
        say = lambda one: f"rank {one.rank}, alpha {one.alpha:g}, at {', '.join(one.modules)}"
        raise ValueError(
            f"init_from={lora.init_from} holds an adapter of {say(found)}, but learner.lora asks "
            f"for {say(wanted)}: set rank, alpha and targets to those of the folder"
        )
