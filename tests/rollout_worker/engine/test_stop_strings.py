"""Stop strings: against a search in the bytes, and real tokenizers against their own text."""

import pathlib

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from models.load_tokenizer import load_tokenizer
from rollout_worker.engine import stop_strings
from rollout_worker.engine.stop_strings import (
    ACCEPT,
    NO_STOP,
    build_stop_automaton,
    parse_token_bytes,
    token_bytes,
)

pytestmark = pytest.mark.slow

SMOLLM2 = pathlib.Path(__file__).parents[3] / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    'Answer: 4 × 3 = 12\n\n\tdef f(x):  return "é" + \'日本語 😀\' + "\x00\x7f"  \r\n<|im_end|> ▁ﷺ'
)


def stops_at(automaton, start, token_ids):
    """Number of tokens after which the row stands in ACCEPT; None if it never does."""
    state = start
    for count, token_id in enumerate(token_ids, 1):
        state = automaton.next_SV[state, token_id]
        if state == ACCEPT:
            return count
    return None


def literally_stops_at(pieces, stops, token_ids):
    text = b""
    for count, token_id in enumerate(token_ids, 1):
        text += pieces[token_id]
        if any(stop.encode() in text for stop in stops):
            return count
    return None


# Few letters, so that prefixes, repeats and near misses are common; é is two bytes, and tokens may
# end between them.
letters = st.sampled_from([b"a", b"b", "é".encode()[:1], "é".encode()[1:]])
pieces_lists = st.lists(st.lists(letters, max_size=4).map(b"".join), min_size=1, max_size=8)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300)
@given(pieces_lists, st.lists(stop_lists, max_size=3), st.data())
def test_a_row_stops_with_the_first_token_that_completes_a_stop_string(pieces, sets, data):
    token_ids = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=30))
    automaton = build_stop_automaton(pieces, sets)
    assert len(automaton.starts) == len(sets)
    for start, stops in zip(automaton.starts, sets, strict=True):
        expected = literally_stops_at(pieces, stops, token_ids)
        assert stops_at(automaton, start, token_ids) == expected


@pytest.mark.parametrize(
    "stops, token_ids, count",
    [
        (["###"], [0, 0, 0], 2),
        (["# #"], [0, 1, 2], 3),
        (["#a"], [0, 3], 2),
        (["aab"], [4, 5], 2),
        (["abab", "ba"], [4, 6], 2),
        (["xyz"], [0, 1, 2, 3, 4, 5, 6], None),
    ],
    ids=["across", "three-tokens", "inside", "repeat", "shorter-first", "absent"],
)
def test_where_a_stop_string_may_lie(stops, token_ids, count):
    pieces = [b"##", b" ", b"#", b"a and more", b"aa", b"ab", b"ba"]
    automaton = build_stop_automaton(pieces, [stops])
    assert stops_at(automaton, automaton.starts[0], token_ids) == count


def test_both_resting_states_are_never_left():
    automaton = build_stop_automaton([b"a", b"b"], [["ab"], []])
    assert automaton.starts[1] == NO_STOP
    np.testing.assert_array_equal(automaton.next_SV[NO_STOP], NO_STOP)
    np.testing.assert_array_equal(automaton.next_SV[ACCEPT], ACCEPT)
    assert automaton.next_SV.dtype == np.int16


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        build_stop_automaton([b"a"], [["a", ""]])


def test_half_a_character_is_refused():
    with pytest.raises(ValueError, match="is not valid text"):
        build_stop_automaton([b"a"], [["\ud83d"]])


def test_a_table_over_the_bound_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(stop_strings, "MOST_TABLE_BYTES", 2**20)
    pieces = [b"a"] * 2**17
    assert build_stop_automaton(pieces, [["ab"]]).next_SV.nbytes == 2**20
    with pytest.raises(ValueError, match=r"5 states over 131072 tokens, a table of 1 MiB.*fewer"):
        build_stop_automaton(pieces, [["abc"]])
    with pytest.raises(ValueError, match="at most 32767 states"):
        build_stop_automaton([b"a"], [["x" * 40_000]])


def assert_bytes_read_as_the_tokenizer_does(tokenizer, text_ids):
    """Text, and ids in random order, which cut characters and break their bytes."""
    pieces = token_bytes(tokenizer)
    read = lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")
    assert len(pieces) == tokenizer.vocab_size
    assert len(text_ids) > 20 and TEXT.split("<")[0] in read(text_ids)
    assert read(text_ids) == tokenizer.decode(text_ids)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, len(pieces), 20).tolist()
        assert read(ids) == tokenizer.decode(ids)


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="needs the SmolLM2 file in downloads/")
def test_bytes_of_a_gguf_tokenizer_are_what_it_decodes_to():
    tokenizer = load_tokenizer(str(SMOLLM2))
    text_ids = tokenizer.encode_chat([{"role": "user", "content": TEXT}])
    assert_bytes_read_as_the_tokenizer_does(tokenizer, text_ids)


def test_bytes_of_the_qwen3_tokenizer_are_what_it_decodes_to(shared):
    tokenizer = load_tokenizer(str(shared / "data" / "tokenizers" / "qwen3"))
    text_ids = tokenizer.encode_chat([{"role": "user", "content": TEXT}])
    assert_bytes_read_as_the_tokenizer_does(tokenizer, text_ids)
    think = tokenizer.encode_chat([{"role": "user", "content": "<think>"}])
    assert "<think>" in tokenizer.decode(think), "an added token that is not special is text"
    assert_bytes_read_as_the_tokenizer_does(tokenizer, text_ids + think)


def test_a_stop_string_ends_real_text_where_it_is_complete(shared):
    tokenizer = load_tokenizer(str(shared / "data" / "tokenizers" / "qwen3"))
    pieces = token_bytes(tokenizer)
    ids = tokenizer.encode_chat([{"role": "user", "content": "x = 7;\n#### 42\n\nQuestion: next"}])
    for stops in (["#### 4"], ["\nQ"], ["estion: n"], ["absent", "7;"]):
        automaton = build_stop_automaton(pieces, [stops])
        count = stops_at(automaton, automaton.starts[0], ids)
        assert count is not None
        text, before = tokenizer.decode(ids[:count]), tokenizer.decode(ids[: count - 1])
        assert any(stop in text for stop in stops) and not any(stop in before for stop in stops)


def test_bytes_of_a_sentencepiece_tokenizer_are_what_it_decodes_to(tmp_path):
    """All but the first blank of the text, which its decoder drops."""
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "n",
        "▁é",
        "x",
    ]
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens(["</s>"])
    raw.add_tokens(["<0xZZ>"])
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    backend.chat_template = "{{ messages[0]['content'] }}"
    backend.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    pieces = token_bytes(tokenizer)
    ids = [names.index(name) for name in ["x", "▁a", "n", "▁", "▁é", "</s>", "<0xC3>", "<0xA9>"]]
    text = b"".join(pieces[i] for i in ids).decode()
    assert text == tokenizer.decode(ids) == "x an  é</s>é"


@pytest.mark.parametrize(
    "stop, count",
    [("<|end|>", 2), ("a<|end|>", 2), ("<|end|>b", 3), ("<\uff5cend\u2581of\uff5c>", 4)],
    ids=["alone", "after-text", "before-text", "as-written"],
)
@pytest.mark.parametrize("decoder", ["ByteLevel", "Metaspace"])
def test_a_stop_string_that_is_a_special_token_fires(stop, count, decoder):
    names = ["a", "<|end|>", "b", "<\uff5cend\u2581of\uff5c>"]
    description = {
        "model": {"vocab": {name: i for i, name in enumerate(names)}},
        "decoder": {"type": decoder, "replacement": "\u2581"},
        "added_tokens": [{"id": i, "content": names[i], "special": True} for i in (1, 3)],
    }
    pieces = parse_token_bytes(description)
    automaton = build_stop_automaton([pieces[i] for i in range(4)], [[stop]])
    assert stops_at(automaton, automaton.starts[0], [0, 1, 2, 3]) == count


def test_unigram_and_metaspace_are_read():
    description = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁the", -1.0], ["<0x41>", -2.0]]},
        "decoder": {"type": "Metaspace", "replacement": "▁"},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    }
    assert parse_token_bytes(description) == {0: b"<unk>", 1: b" the", 2: b"<0x41>"}


def test_a_tokenizer_of_another_kind_is_refused():
    description = {"model": {"vocab": {"##a": 0}}, "decoder": {"type": "WordPiece"}}
    with pytest.raises(ValueError, match="decodes by WordPiece: end completions by stop ids"):
        parse_token_bytes(description)
