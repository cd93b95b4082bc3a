"""What an export takes over from the model that came in: its settings, its tokenizer, its licence.

They are read when a run starts: what lies in that folder at the end of the run may be something
else, or nothing.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from models.files.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    LICENCES,
    is_gguf,
    locate,
    read_json_if_there,
)

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*.jinja")
_TOKENIZER_FILES = (
    *("tokenizer.json", TOKENIZER_CONFIG, _SPECIAL_TOKENS_MAP, "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", CHAT_TEMPLATE),
    *_OTHER_TEMPLATES,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarriedFiles:
    """Of a model that came in; all empty for one GGUF file, whose tokenizer is built anew."""

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Content of config.json."""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Content of generation_config.json."""
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """The tokenizer's files by their path within the folder, byte for byte; but for a chat template
    that the run replaces and keys that only one age of transformers reads."""
    licences: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Licence and notice by file name."""

    def generation_config(self, special: Mapping[str, Any]) -> dict[str, Any]:
        """generation_config.json as it came, ending on every token that the run stopped at.

        Args:
            special: `eos_token_id` as a list, and ids that stand in where none came.
        """
        content = {**special, **self.generation}
        eos = self.generation.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        further = [token for token in special.get("eos_token_id", []) if token not in listed]
        return {**content, "eos_token_id": [*listed, *further]} if further else content

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the files of tokenizer and licence into an existing folder."""
        for name, content in {**self.tokenizer, **self.licences}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


NOTHING_CARRIED = CarriedFiles()


def read_carried(
    model_path: str, *, tokenizer: str | None = None, chat_template: str | None = None
) -> CarriedFiles:
    """Reads what an export of this model is to take over.

    Args:
        model_path: HF folder, .gguf file or hub id.
        tokenizer: folder or hub id of another tokenizer; None takes the model's own.
        chat_template: a Jinja template that replaces the tokenizer's.

    Raises:
        ValueError: if there is no such model or tokenizer, or a file of settings is damaged.
    """
    place = locate(model_path, weights=False)
    tokenizer_place = locate(tokenizer, weights=False) if tokenizer is not None else place
    own = {} if is_gguf(tokenizer_place) else _tokenizer_files(tokenizer_place, chat_template)
    if is_gguf(place):
        return CarriedFiles(tokenizer=own)
    return CarriedFiles(
        config=read_json_if_there(place / CONFIG),
        generation=read_json_if_there(place / GENERATION_CONFIG),
        tokenizer=own,
        licences={path.name: path.read_bytes() for path in _matching(place, LICENCES)},
    )


def readable_by_both(content: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json or special_tokens_map.json, as transformers 4 and 5 read it alike.

    Version 5 writes a class that version 4 does not have, and lists further special tokens under a
    key where version 4 expects a mapping and raises an AttributeError.
    """
    plain = dict(content)
    if plain.get("tokenizer_class") == "TokenizersBackend":
        plain["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(plain.get("extra_special_tokens"), list):
        further = plain.pop("extra_special_tokens")
        earlier = plain.get("additional_special_tokens") or []
        plain["additional_special_tokens"] = [
            *earlier,
            *(token for token in further if token not in earlier),
        ]
    named = plain.get("model_specific_special_tokens")
    if isinstance(named, dict) and "extra_special_tokens" not in plain:
        plain["extra_special_tokens"] = plain.pop("model_specific_special_tokens")
    return plain


def make_readable_by_both(folder: pathlib.Path) -> None:
    """Rewrites the settings of a tokenizer's folder where `readable_by_both` changes them."""
    for name in (TOKENIZER_CONFIG, _SPECIAL_TOKENS_MAP):
        content = read_json_if_there(folder / name)
        if readable_by_both(content) != content:
            (folder / name).write_bytes(_json_bytes(readable_by_both(content)))


def _tokenizer_files(folder: pathlib.Path, chat_template: str | None) -> dict[str, bytes]:
    files = {}
    for path in _matching(folder, _TOKENIZER_FILES):
        files[path.relative_to(folder).as_posix()] = path.read_bytes()
    for name in {TOKENIZER_CONFIG, _SPECIAL_TOKENS_MAP} & files.keys():
        content = read_json_if_there(folder / name)
        changed = readable_by_both(content)
        if chat_template is not None and "chat_template" in content:
            changed["chat_template"] = chat_template
        if changed != content:
            files[name] = _json_bytes(changed)
    if chat_template is not None:
        for path in _matching(folder, _OTHER_TEMPLATES):
            del files[path.relative_to(folder).as_posix()]
        files[CHAT_TEMPLATE] = chat_template.encode()
    return files


def _matching(folder: pathlib.Path, patterns: tuple[str, ...]) -> Iterator[pathlib.Path]:
    for pattern in patterns:
        yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
