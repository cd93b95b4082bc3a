"""A folder's own tokenizer.json is followed, whatever its model type usually has."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from models.load_tokenizer import load_tokenizer


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_the_pre_tokenizer_of_the_file_is_kept(tmp_path, model_type):
    """Words of this vocabulary have no merges: another pre-tokenizer would fall back to bytes."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "answer"]
    raw = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], ignore_merges=True)
    )
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    backend.chat_template = "{{ messages[0]['content'] }}"
    backend.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "vocab_size": 300, "eos_token_id": 258})
    )
    loaded = load_tokenizer(str(tmp_path))
    text = "answer 12345"
    assert loaded.encode_chat([{"role": "user", "content": text}]) == raw.encode(text).ids
    assert len(raw.encode(text).ids) == 6, "answer, a blank, 12, and 3, 4, 5 as bytes"
