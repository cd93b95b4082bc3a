"""Reads the tokenizer of a model from its files: an HF folder, a hub id, or a .gguf file."""

import datetime
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Otherwise transformers warns at every start that torch is absent, which a tokenizer does not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
import transformers

from models.files.gguf import open_gguf
from models.files.gguf_tokenizer import build_tokenizer, special_token
from models.files.hf_folder import CONFIG, GENERATION_CONFIG, is_gguf, locate, read_json_if_there
from models.tokenizer import Tokenizer

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    model_path: str,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    stop_tokens: Sequence[str] = (),
    moment: datetime.datetime | None = None,
    template_args: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Tokenizer:
    """Loads the tokenizer that belongs to a model.

    Args:
        model_path: HF folder, .gguf file or hub id.
        tokenizer: folder or hub id of another tokenizer; None takes the model's own.
        chat_template: a Jinja template that replaces the tokenizer's.
        stop_tokens: further tokens that end a completion; each must be one token.
        moment: the time that a chat template reads, with its time zone; None is now.
        template_args: arguments of the chat template, such as `enable_thinking`.
        tools: JSON schemas that it offers where a conversation names none.

    Raises:
        ValueError: if there is no tokenizer or no chat template, or the tokenizer has more tokens
            than the model; names the path and the setting to give.
    """
    place = locate(model_path, weights=False)
    if tokenizer is not None:
        backend = _folder_backend(locate(tokenizer, weights=False))
    elif is_gguf(place):
        backend = _gguf_backend(place)
    else:
        backend = _folder_backend(place)
    if chat_template is not None:
        backend.chat_template = chat_template
    model_eos, model_rows = _model_facts(place)
    if model_rows is not None and len(backend) > model_rows:
        raise ValueError(
            f"the tokenizer of {tokenizer or model_path} has {len(backend)} tokens, but the model "
            f"{model_path} embeds only {model_rows}: they do not belong together"
        )
    eos_ids = model_eos | {_single_token(backend, text) for text in stop_tokens}
    return Tokenizer(
        backend,
        source=tokenizer or model_path,
        eos_ids=eos_ids,
        template_is_given=chat_template is not None,
        moment=moment,
        template_args=template_args,
        tools=tools,
    )


def read_vocabulary(path: str) -> dict[str, int]:
    """The id of every token of a model's tokenizer, or of a tokenizer alone.

    Args:
        path: HF folder, .gguf file or hub id.

    Raises:
        ValueError: if there is no tokenizer.
    """
    place = locate(path, weights=False)
    backend = _gguf_backend(place) if is_gguf(place) else _folder_backend(place, "put one there")
    return backend.get_vocab()


def _folder_backend(
    folder: pathlib.Path, fix: str = "set model.tokenizer to a folder or hub id that does"
):
    # Given the configuration alone, transformers makes a tokenizer without a vocabulary.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ValueError(f"{folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}): {fix}")
    # AutoTokenizer rebuilds the pre-tokenizer that it expects of a model type; tokenizer.json says
    # which one the model was trained with.
    whole = (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # what `tokenizers` raises for a damaged file has no other class
        raise ValueError(f"{folder} holds no tokenizer that loads ({error}): {fix}") from error


def _gguf_backend(path: pathlib.Path):
    metadata = open_gguf(path).metadata
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    special = {name: special_token(metadata, role) for name, role in roles.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(path, metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def _model_facts(place: pathlib.Path) -> tuple[set[int], int | None]:
    """Stop ids that the model's own files name, and the rows of its embedding if they say so."""
    if is_gguf(place):
        file = open_gguf(place)
        keys = (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
        eos = {file.metadata[key] for key in keys if key in file.metadata}
        _check_eos(eos, file.config.vocab_size, place)
        return eos, file.config.vocab_size
    config = read_json_if_there(place / CONFIG)
    generation = read_json_if_there(place / GENERATION_CONFIG)
    rows = config.get("vocab_size")
    eos = set()
    for content, name in ((config, CONFIG), (generation, GENERATION_CONFIG)):
        named = _ids(content, place / name)
        _check_eos(named, rows, place / name)
        eos |= named
    return eos, rows


def _check_eos(eos: set[int], rows: int | None, path: pathlib.Path) -> None:
    beyond = sorted(token_id for token_id in eos if token_id < 0 or token_id >= (rows or math.inf))
    if beyond:
        raise ValueError(
            f"{path}: the end-of-sequence id {beyond[0]} is no token of the model, whose "
            f"vocabulary has {rows} rows (0 to {(rows or 0) - 1}): correct the file"
        )


def _ids(content: Mapping[str, Any], path: pathlib.Path) -> set[int]:
    value = content.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        raise ValueError(f"{path}: eos_token_id={value!r} must be an integer or a list of them")
    return set(listed)


def _single_token(backend, text: str) -> int:
    token_id = backend.get_vocab().get(text)
    if token_id is None:
        raise ValueError(
            f"model.stop_tokens: {text!r} is not one token of this tokenizer; give tokens as they "
            "stand in its vocabulary"
        )
    return token_id
