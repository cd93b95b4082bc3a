"""The byte-level BPE tokenizer that a GGUF file describes, rebuilt with the `tokenizers` package.

GGUF stores vocabulary and merges, but only a name for the way text is cut before them; the
rules behind the names are those of the families' own tokenizer.json.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel, PostProcessor, Sequence, TemplateProcessing

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_then_bytes(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % digits}")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, behavior="isolated"), _byte_level(False)]
    )


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(True)]
    )


_PRE_TOKENIZERS = {
    "default": lambda: _byte_level(True),
    "gpt-2": lambda: _byte_level(True),
    "llama-bpe": lambda: _split_then_bytes("{1,3}"),
    "qwen2": lambda: _split_then_bytes(""),
    "smollm": _digits_then_bytes,
}


def build_tokenizer(path: pathlib.Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer of a GGUF file.

    Args:
        path: only for messages.
        metadata: of `read_gguf_header`.

    Raises:
        ValueError: if the metadata holds no BPE vocabulary, or one cut in an unknown way; names
            the file, the key and the value.
    """
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
    instead = "set model.tokenizer to a folder or hub id that holds the tokenizer"
    if get("model") != "gpt2":
        raise ValueError(
            f"{path}: tokenizer.ggml.model={get('model')!r} is not supported: only 'gpt2' "
            f"(byte-level BPE) is; {instead}"
        )
    pre = get("pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={pre!r} is not supported: known are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; {instead}"
        )
    tokens, merges, types = get("tokens"), get("merges"), get("token_type")
    if not tokens or merges is None or len(types or tokens) != len(tokens):
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens, merges and token_type do not fit: {instead}"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(
                f"{path}: tokenizer.ggml.merges holds {' '.join(pair)!r}, which joins no two "
                f"tokens of the vocabulary to a third: {instead}"
            )
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=pairs,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types or [], strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    steps: list[PostProcessor] = [ByteLevel(trim_offsets=False)]
    bos = special_token(metadata, "bos")
    if bos is not None and get("add_bos_token", pre == "llama-bpe"):
        steps.append(
            TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, tokens.index(bos))],
            )
        )
    tokenizer.post_processor = Sequence(steps)
    return tokenizer


def special_token(metadata: Mapping[str, Any], role: str) -> str | None:
    """Text of the special token with a role such as `bos`, `eos`, `eot` or `padding`."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None
