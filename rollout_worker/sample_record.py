"""Records of completions for samples.jsonl: prompt, text, tokens with their logprobs, and scores.

Of a group whose lease is marked for the log, the first completion is recorded. Of any group, one
notable completion may be: one that could not be scored, or whose strict and lenient answers differ.
Their number is limited under each policy version. A record of 2,048 tokens takes about 10 ms to
make; this happens in the thread that pushes groups, while the device decodes.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NotRequired, TypedDict

import numpy as np

from rollout_worker.data.prompts import Prompt
from rollout_worker.rewards.answers import FinalAnswer, lenient_answer, strict_answer
from services.wire.messages import Completion, Group

MOST_TOKENS = 2048
"""Of one record; the number of further tokens is in `tokens_cut`."""
MOST_ANSWER_CHARACTERS = 20_000
"""A longer text is not searched for its answer: the reward processes bound the time of that
search, and here nothing does."""
MOST_VALUE_CHARACTERS = 60
MOST_OPEN_TOKENS = 32
"""After this many consecutive tokens that complete no character, they are shown as they are."""

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
    notes: NotRequired[dict[str, str]]
    """What scorers say of their rewards, such as the verdict of a judge, by scorer."""
    tokens: list[list[str | float | None]]
    """Text and logprob (nats) of each; null where an environment wrote the token."""
    segments: NotRequired[list[int]]
    """Tokens of each segment of an episode: the model's and the environment's in turn."""
    record_starts: NotRequired[list[int]]
    """Places of the segments that begin a new record."""
    source: NotRequired[str]
    """Name of the prompt's source, where several are trained on."""
    tokens_cut: NotRequired[int]
    """Tokens after MOST_TOKENS."""
    parsed: NotRequired[dict[str, str | None]]
    """The numbers that `gsm8k_answer` reads, strict and lenient."""


class SampleRecords:
    """Makes the records of groups, a limited number of notable ones under each policy version."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        text: Callable[[np.ndarray], str],
        *,
        per_step: int,
        reads_numbers: bool,
    ):
        """Args:
        decode: text of token ids, special tokens visible.
        text: a completion as the scorers read it.
        per_step: records that the log keeps of a step, and the largest number of notable records
            under one policy version; 0 makes no records.
        reads_numbers: whether `gsm8k_answer` is among the scorers; then `parsed` has the numbers
            that it reads.
        """
        self._decode = decode
        self._text = text
        self._per_step = per_step
        self._reads_numbers = reads_numbers
        self._version = -1
        self._notable = 0

    def of_group(
        self,
        group: Group,
        prompt: Prompt,
        *,
        marked: bool,
        notes: Sequence[dict[str, str]] = (),
    ) -> tuple[Sample, ...]:
        """At most two records.

        Args:
            prompt: of the group.
            marked: whether the first completion is to be recorded.
            notes: of the completions, by scorer, in their order; none where there are none.
        """
        if not self._per_step:
            return ()
        if group.policy_version != self._version:
            self._version, self._notable = group.policy_version, 0
        chosen = choose_completions(
            group.completions, first=marked, notable=self._notable < self._per_step
        )
        self._notable += any(why != FIRST for _, why in chosen)
        records = []
        for completion, why in chosen:
            record = self._record(group, prompt, completion, why)
            if notes and notes[completion.sample_index]:
                record["notes"] = notes[completion.sample_index]
            records.append(record)
        return tuple(records)

    def _record(self, group: Group, prompt: Prompt, completion: Completion, why: str) -> Sample:
        text = self._text(completion.token_ids)
        token_ids = completion.token_ids[:MOST_TOKENS].tolist()
        drawn = iter(completion.behavior_logprobs.tolist())
        logprobs = [_rounded(next(drawn)) if own else None for own in completion.is_sampled]
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
            "completion_tokens": completion.model_tokens,
            "rewards": completion.rewards,
            "total_reward": completion.total_reward,
            "reward_error": completion.reward_error,
            "tokens": [
                [piece, logprob]
                for piece, logprob in zip(
                    token_texts(self._decode, token_ids), logprobs, strict=False
                )
            ],
        }
        if prompt.source:
            record["source"] = prompt.source
        if completion.segment_tokens:
            record["segments"] = list(completion.segment_tokens)
        if completion.record_starts:
            record["record_starts"] = list(completion.record_starts)
        if cut := len(completion.token_ids) - len(token_ids):
            record["tokens_cut"] = cut
        if self._reads_numbers:
            record["parsed"] = parsed_answers(text)
        return record


def choose_completions(
    completions: Sequence[Completion], *, first: bool, notable: bool
) -> list[tuple[Completion, str]]:
    """The completions of a group that are recorded, each with the reason.

    Args:
        first: whether the first one is chosen.
        notable: whether the first notable one is chosen; it may be the same one.
    """
    found = [(c, why) for c in completions if (why := _reason_to_record(c))][: int(notable)]
    if first and not any(c is completions[0] for c, _ in found):
        return [(completions[0], FIRST), *found]
    return found


def _reason_to_record(completion: Completion) -> str:
    if completion.reward_error:
        return REWARD_ERROR
    return DISAGREEMENT if any(completion.disagreements.values()) else ""


def token_texts(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined, the text of all tokens.

    A token that ends inside a character adds nothing, and the token that completes the character
    adds it. Bytes that never form a character are shown as U+FFFD, at the next token that completes
    one, at the last token, or after `MOST_OPEN_TOKENS`.

    Args:
        decode: text of token ids, special tokens visible.
    """
    texts = []
    # The text of a token can depend on the token before it, as where a decoder drops a leading
    # blank. So the tokens from `before` to `done` are decoded again with each new one, and their
    # text is removed.
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

    None if there is no answer, if it is not one number, or if the text is longer than
    `MOST_ANSWER_CHARACTERS`.
    """
    if len(text) > MOST_ANSWER_CHARACTERS:
        return {"strict": None, "lenient": None}
    return {"strict": _value(strict_answer(text)), "lenient": _value(lenient_answer(text))}


def _value(answer: FinalAnswer | None) -> str | None:
    """A decimal number if that is exact and short, else a fraction; shortened in its middle."""
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
    """Six digits are enough for the page's colours; NaN and infinity stay."""
    return float(f"{logprob:.6g}")
