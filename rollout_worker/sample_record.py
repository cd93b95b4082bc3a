"""What samples.jsonl says of a completion: prompt, text, tokens with their logprobs, and scores.

A group whose lease is marked for the log gives its first completion. Any group may give one that
tells something: a completion that could not be scored, or whose strict and lenient answers differ;
a few of those are made under each policy version, however many there are. A record of 2,048 tokens
takes about 10 ms to make, which is spent where groups are pushed, beside the decoding.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NotRequired, TypedDict

import numpy as np

from rollout_worker.data.prompts import Prompt
from rollout_worker.rewards.answers import FinalAnswer, lenient_answer, strict_answer
from services.wire.messages import Completion, FinishReason, Group

MOST_TOKENS = 2048
"""Of one record; what follows is counted in `tokens_cut`."""
MOST_ANSWER_CHARACTERS = 20_000
"""A longer text is not searched for its answer: nothing bounds the time of that here, as the
reward processes have it bounded."""
MOST_VALUE_CHARACTERS = 60
MOST_OPEN_TOKENS = 32
"""Tokens in a row that complete no character, after which they are shown as they are."""

FIRST, DISAGREEMENT, REWARD_ERROR = "first", "disagreement", "reward_error"


class Sample(TypedDict):
    """One line of samples.jsonl, but for the step."""

    group_id: str
    policy_version: int
    worker: str
    prompt_id: int
    sample_index: int
    why: str
    """FIRST, DISAGREEMENT or REWARD_ERROR."""
    question: str
    answer: str
    prompt: str
    completion: str
    finish_reason: str
    completion_tokens: int
    rewards: dict[str, float]
    total_reward: float
    reward_error: str
    tokens: list[list[str | float]]
    """Text and logprob (nats) of each."""
    tokens_cut: NotRequired[int]
    """Tokens after MOST_TOKENS."""
    parsed: NotRequired[dict[str, str | None]]
    """The numbers that `gsm8k_answer` reads, strict and lenient."""


class SampleRecords:
    """Makes the records of groups; counts those that it made under the newest policy version."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        text: Callable[[np.ndarray, FinishReason], str],
        *,
        per_step: int,
        reads_numbers: bool,
    ):
        """Args:
        decode: text of token ids, special tokens visible.
        text: a completion as the scorers read it.
        per_step: records that the log keeps of a step, and most of those that tell something
            which are made under one policy version; 0 makes none.
        reads_numbers: whether `gsm8k_answer` is among the scorers, so that `parsed` says which
            numbers it reads.
        """
        self._decode = decode
        self._text = text
        self._per_step = per_step
        self._reads_numbers = reads_numbers
        self._version = -1
        self._telling = 0

    def of_group(self, group: Group, prompt: Prompt, *, marked: bool) -> tuple[Sample, ...]:
        """At most two records.

        Args:
            prompt: what the group was made from.
            marked: whether the first completion is wanted.
        """
        if not self._per_step:
            return ()
        if group.policy_version != self._version:
            self._version, self._telling = group.policy_version, 0
        chosen = choose(group.completions, first=marked, telling=self._telling < self._per_step)
        self._telling += any(why != FIRST for _, why in chosen)
        return tuple(self._record(group, prompt, completion, why) for completion, why in chosen)

    def _record(self, group: Group, prompt: Prompt, completion: Completion, why: str) -> Sample:
        text = self._text(completion.token_ids, completion.finish_reason)
        token_ids = completion.token_ids[:MOST_TOKENS].tolist()
        record: Sample = {
            "group_id": group.group_id,
            "policy_version": group.policy_version,
            "worker": group.worker,
            "prompt_id": group.prompt_id,
            "sample_index": completion.sample_index,
            "why": why,
            "question": prompt.question,
            "answer": prompt.answer,
            "prompt": self._decode(group.prompt_token_ids.tolist()),
            "completion": text,
            "finish_reason": completion.finish_reason.value,
            "completion_tokens": len(completion.token_ids),
            "rewards": completion.rewards,
            "total_reward": completion.total_reward,
            "reward_error": completion.reward_error,
            "tokens": [
                [piece, _rounded(logprob)]
                for piece, logprob in zip(
                    token_texts(self._decode, token_ids),
                    completion.behavior_logprobs.tolist(),
                    strict=False,
                )
            ],
        }
        if cut := len(completion.token_ids) - len(token_ids):
            record["tokens_cut"] = cut
        if self._reads_numbers:
            record["parsed"] = parsed_answers(text)
        return record


def choose(
    completions: Sequence[Completion], *, first: bool, telling: bool
) -> list[tuple[Completion, str]]:
    """The completions of a group that are logged, and why each is.

    Args:
        first: whether the first one is wanted.
        telling: whether the first one that tells something is; it may be the same.
    """
    found = [(c, why) for c in completions if (why := _what_it_tells(c))][: int(telling)]
    if first and not any(c is completions[0] for c, _ in found):
        return [(completions[0], FIRST), *found]
    return found


def _what_it_tells(completion: Completion) -> str:
    if completion.reward_error:
        return REWARD_ERROR
    return DISAGREEMENT if any(completion.disagreements.values()) else ""


def token_texts(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined, they are the text of all.

    A token that ends inside a character adds nothing, and the one that completes it adds the
    character. Bytes that never become one are shown as U+FFFD, with the next token that completes
    something, the last one, or the `MOST_OPEN_TOKENS`-th.

    Args:
        decode: text of token ids, special tokens visible.
    """
    texts = []
    # Tokenizers look at the token before, as where they drop a leading blank: `before` to `done`
    # is decoded with each new token, and taken off again.
    before = done = 0
    for end in range(1, len(token_ids) + 1):
        known = decode(token_ids[before:done])
        text = decode(token_ids[before:end])
        is_open = text.endswith("\ufffd") and end - done < MOST_OPEN_TOKENS
        if is_open and end < len(token_ids):
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before, done = done, end
    return texts


def parsed_answers(text: str) -> dict[str, str | None]:
    """The numbers that `gsm8k_answer` reads in a completion.

    None where there is no answer, where it is not one number, and in a text of more than
    `MOST_ANSWER_CHARACTERS`.
    """
    if len(text) > MOST_ANSWER_CHARACTERS:
        return {"strict": None, "lenient": None}
    return {"strict": _value(strict_answer(text)), "lenient": _value(lenient_answer(text))}


def _value(answer: FinalAnswer | None) -> str | None:
    """Decimal where that is exact and short, else a fraction; cut in its middle if long."""
    if answer is None or answer.value is None:
        return None
    text = number_text(answer.value)
    if len(text) <= MOST_VALUE_CHARACTERS:
        return text
    half = MOST_VALUE_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


def number_text(value: Fraction) -> str:
    """An exact number as people write it: `42`, `-0.25`, `1/3`."""
    numerator, denominator = value.as_integer_ratio()
    if denominator == 1:
        return str(numerator)
    places = 0
    while places < MOST_VALUE_CHARACTERS and (10**places) % denominator:
        places += 1
    if (10**places) % denominator:
        return f"{numerator}/{denominator}"
    digits = str(abs(numerator) * (10**places // denominator)).rjust(places + 1, "0")
    return f"{'-' if numerator < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _rounded(logprob: float) -> float:
    """Six digits say all that a shade shows; NaN and infinity stay."""
    return float(f"{logprob:.6g}")
