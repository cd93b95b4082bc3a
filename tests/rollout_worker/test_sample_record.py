"""Records of completions for samples.jsonl."""

import dataclasses
import json
import math
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.accounting.jsonl import strict_line
from models.load_tokenizer import load_tokenizer
from rollout_worker import sample_record
from rollout_worker.data.prompts import Prompt
from rollout_worker.sample_record import (
    MOST_ANSWER_CHARACTERS,
    MOST_OPEN_TOKENS,
    SampleRecords,
    number_text,
    parsed_answers,
    token_texts,
)
from services.wire.messages import Completion, FinishReason, Group

DEMO = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "demo" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    """The demo model's: byte-level, as most are."""
    return load_tokenizer(str(DEMO))


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(ids)


def ids_of(tokenizer, text):
    return tokenizer._backend.encode(text, add_special_tokens=False)


def completion(index=0, ids=(1, 2), **changes):
    fields = dict(
        sample_index=index,
        token_ids=np.array(ids, np.int32),
        behavior_logprobs=np.linspace(-1.5, -0.5, len(ids)).astype(np.float32),
        finish_reason=FinishReason.STOP,
        rewards={"gsm8k_answer": 1.0},
        total_reward=1.0,
    )
    return Completion(**(fields | changes))


def scored(index, strict, lenient):
    rewards = {"a": strict, "a/strict": strict, "a/lenient": lenient}
    return completion(index, rewards=rewards, total_reward=strict)


def failed(index):
    return completion(index, rewards={}, total_reward=math.nan, reward_error="a: timed out")


def group_of(*completions, version=3, prompt_ids=(5, 6)):
    return Group(
        run_id="run",
        group_id="g00000007",
        attempt=0,
        prompt_id=11,
        epoch=0,
        policy_version=version,
        weight_digest="",
        worker="rollout-0",
        prompt_token_ids=np.array(prompt_ids, np.int32),
        completions=completions,
        phase_s={},
    )


PROMPT = Prompt(
    prompt_id=11, question="1 + 1?", answer="2", token_ids=np.array([5, 6], np.int32), item={}
)


def records(decode, *, per_step=4, reads_numbers=False):
    def text(token_ids):
        return decode(token_ids.tolist())

    return SampleRecords(decode, text, per_step=per_step, reads_numbers=reads_numbers)


TEXTS = st.text(max_size=60) | st.sampled_from(["<|im_start|>user\n1 + 1 <|im_end|>", "日本 😀é"])


@given(text=TEXTS)
def test_the_texts_of_the_tokens_join_to_the_text(tokenizer, decode, text):
    token_ids = ids_of(tokenizer, text)
    texts = token_texts(decode, token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == decode(token_ids)


@given(data=st.data())
def test_so_they_do_for_any_tokens(tokenizer, decode, data):
    token_ids = data.draw(
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=MOST_OPEN_TOKENS)
    )
    assert "".join(token_texts(decode, token_ids)) == decode(token_ids)


def test_a_token_that_ends_inside_a_character_adds_nothing(tokenizer, decode):
    token_ids = ids_of(tokenizer, "a😀b")
    texts = token_texts(decode, token_ids)
    assert len(token_ids) > 3, "the smile is several tokens"
    assert [text for text in texts if text] == ["a", "😀", "b"]
    assert texts.index("😀") > 1


def test_bytes_that_never_become_a_character_are_shown(tokenizer, decode):
    half = ids_of(tokenizer, "😀")[0]
    texts = token_texts(decode, [half, *ids_of(tokenizer, "x")])
    assert texts == ["", "\ufffdx"]
    texts = token_texts(decode, [half] * 200)
    assert "".join(texts) == "\ufffd" * 200 and any(texts[:MOST_OPEN_TOKENS])


def test_special_tokens_are_visible(tokenizer, decode):
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": "1 + 1?"}])
    (stop,) = list(tokenizer.stop_ids)[:1]
    group = group_of(completion(ids=(*ids_of(tokenizer, "#### 2"), stop)), prompt_ids=prompt_ids)
    (record,) = records(decode).of_group(group, PROMPT, marked=True)
    special = tokenizer._backend.convert_ids_to_tokens(stop)
    assert record["tokens"][-1][0] == special
    assert record["prompt"] == decode(prompt_ids)
    assert record["prompt"].startswith("<|im_start|>user\n1 + 1?<|im_end|>")


def test_a_marked_group_gives_its_first_completion_and_one_that_tells_something(decode):
    group = group_of(completion(0), scored(1, 1.0, 1.0), scored(2, 0.0, 1.0), failed(3))
    made = records(decode).of_group(group, PROMPT, marked=True)
    assert [(one["sample_index"], one["why"]) for one in made] == [
        (0, "first"),
        (2, "disagreement"),
    ]
    assert made[0]["question"] == "1 + 1?" and made[0]["group_id"] == "g00000007"
    (notable,) = records(decode).of_group(group, PROMPT, marked=False)
    assert notable["sample_index"] == 2
    (both,) = records(decode).of_group(group_of(failed(0), failed(1)), PROMPT, marked=True)
    assert (both["sample_index"], both["why"]) == (0, "reward_error")
    assert records(decode).of_group(group_of(completion(0)), PROMPT, marked=False) == ()


def test_no_more_than_a_few_that_tell_something_are_made_under_one_version(decode):
    maker = records(decode, per_step=2)
    for version in (3, 4):
        made = [
            maker.of_group(group_of(completion(0), failed(1), version=version), PROMPT, marked=m)
            for m in (False, True, False, True)
        ]
        assert [[one["why"] for one in of_group] for of_group in made] == [
            ["reward_error"],
            ["first", "reward_error"],
            [],
            ["first"],
        ]


def test_nothing_is_made_where_nothing_is_logged():
    def never(*_):
        raise AssertionError("decoded for nothing")

    maker = SampleRecords(never, never, per_step=0, reads_numbers=True)
    assert maker.of_group(group_of(failed(0)), PROMPT, marked=True) == ()


def test_a_long_completion_is_cut_and_says_how_much(decode, monkeypatch):
    monkeypatch.setattr(sample_record, "MOST_TOKENS", 3)
    group = group_of(completion(ids=range(20, 30)))
    (record,) = records(decode).of_group(group, PROMPT, marked=True)
    assert len(record["tokens"]) == 3 and record["tokens_cut"] == 7
    assert record["completion_tokens"] == 10 and record["completion"] == decode(range(20, 30))


def test_numbers_that_are_not_finite_become_strict_json(decode):
    logprobs = np.array([-0.25, math.nan, -math.inf], np.float32)
    group = group_of(
        completion(
            ids=(1, 2, 3),
            behavior_logprobs=logprobs,
            rewards={"a": math.inf},
            total_reward=math.nan,
        )
    )
    (record,) = records(decode).of_group(group, PROMPT, marked=True)
    assert "tokens_cut" not in record and "parsed" not in record

    def refuse(constant):
        raise AssertionError(f"bare {constant} is not JSON")

    read = json.loads(strict_line(record), parse_constant=refuse)
    assert [logprob for _, logprob in read["tokens"]] == [-0.25, "NaN", "-Infinity"]
    assert read["rewards"] == {"a": "Infinity"} and read["total_reward"] == "NaN"


def test_tokens_of_the_environment_have_no_logprob(decode):
    episode = completion(
        ids=range(20, 26),
        behavior_logprobs=np.array([-0.25, -0.5, -0.75], np.float32),
        segment_tokens=(1, 3, 2),
    )
    [record] = records(decode).of_group(group_of(episode), PROMPT, marked=True)
    assert [logprob for _, logprob in record["tokens"]] == [-0.25, None, None, None, -0.5, -0.75]
    assert record["completion_tokens"] == 3 and record["segments"] == [1, 3, 2]
    [record] = records(decode).of_group(group_of(completion()), PROMPT, marked=True)
    assert "segments" not in record
    several = dataclasses.replace(episode, record_starts=(1,))
    [record] = records(decode).of_group(group_of(several), PROMPT, marked=True)
    assert record["record_starts"] == [1] and record["completion_tokens"] == 3


def test_answers_are_recorded_if_a_scorer_reads_numbers(tokenizer, decode):
    group = group_of(completion(ids=ids_of(tokenizer, "so 1 + 1 is 1,234.50")))
    (record,) = records(decode, reads_numbers=True).of_group(group, PROMPT, marked=True)
    assert record["parsed"] == {"strict": None, "lenient": "1234.5"}


@pytest.mark.parametrize(
    "text, strict, lenient",
    [
        ("#### 42", "42", "42"),
        ("it is 7", None, "7"),
        ("#### 1/3", "1/3", "1/3"),
        ("#### -0.250", "-0.25", "-0.25"),
        ("#### 12 or 24", None, None),
        ("nothing", None, None),
        ("#### " + "9" * 900, "9" * 30 + "..." + "9" * 30, "9" * 30 + "..." + "9" * 30),
        (" " * MOST_ANSWER_CHARACTERS + "#### 1", None, None),
    ],
)
def test_what_was_parsed_is_a_short_text(text, strict, lenient):
    assert parsed_answers(text) == {"strict": strict, "lenient": lenient}


@given(st.fractions())
def test_a_number_is_written_exactly(value):
    text = number_text(value)
    assert Fraction(text) == value and len(text) < 200


def test_the_source_is_recorded_where_there_are_several(decode):
    group = group_of(scored(0, 1.0, 1.0))
    (alone,) = records(decode).of_group(group, PROMPT, marked=True)
    assert "source" not in alone
    of_many = dataclasses.replace(PROMPT, source="sums")
    (one,) = records(decode).of_group(group, of_many, marked=True)
    assert one["source"] == "sums"


def test_what_scorers_say_of_a_completion_is_in_its_record(decode):
    group = group_of(completion(0), failed(1))
    notes = ({"judge": "Grade: 7"}, {})
    first, second = records(decode).of_group(group, PROMPT, marked=True, notes=notes)
    assert first["notes"] == {"judge": "Grade: 7"} and "notes" not in second
