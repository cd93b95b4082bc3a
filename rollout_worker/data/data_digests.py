"""What tells whether two processes, or a run and its resume, read the same data."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from rollout_worker.data.prompts import PromptSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDigests:
    """sha256, hex, of everything that is read of data.train and data.eval.

    Of a reasoning_gym source, `records` covers what the items are made from, the version of the
    package included, and `answers` nothing: a few tasks name another of several right answers in
    each process, and leave it to their own scorer.
    """

    prompts: str
    """Indices and tokens."""
    answers: str
    records: str
    """All fields of the records, since scorers read them."""
    eval_prompts: str
    eval_answers: str
    eval_records: str

    def differences(self, other: "DataDigests") -> list[str]:
        """What differs, such as `answers of data.eval`; of two sources with other prompts, only
        these.
        """
        names = [each.name for each in dataclasses.fields(self)]
        different = [name for name in names if getattr(self, name) != getattr(other, name)]
        # Another answer is another record too: the first of a set says the most.
        first = {name.startswith("eval_"): name for name in reversed(different)}
        return [part_of_data(name) for name in different if name in first.values()]


def part_of_data(name: str) -> str:
    """What a field of DataDigests covers, such as `answers of data.eval`."""
    part = name.removeprefix("eval_")
    return f"{part} of data.{'train' if part == name else 'eval'}"


def digest_data(train: PromptSet, held_out: PromptSet | None) -> DataDigests:
    """Computes the digests; a run without data.eval has those of an empty set."""
    none = PromptSet(prompts=(), overlong=0)
    prompts, answers, records = _digests(train)
    eval_prompts, eval_answers, eval_records = _digests(held_out or none)
    return DataDigests(
        prompts=prompts,
        answers=answers,
        records=records,
        eval_prompts=eval_prompts,
        eval_answers=eval_answers,
        eval_records=eval_records,
    )


def _digests(read: PromptSet) -> tuple[str, str, str]:
    """Of prompts, answers and records."""
    tokens = hashlib.sha256()
    for prompt in read.prompts:
        tokens.update(f"{prompt.prompt_id}:".encode())
        tokens.update(prompt.token_ids.tobytes())
    if read.procedural:
        origins = [prompt.item["reasoning_gym"] for prompt in read.prompts]
        return tokens.hexdigest(), _of_json(()), _of_json(origins)
    answers = [prompt.answer for prompt in read.prompts]
    return tokens.hexdigest(), _of_json(answers), _of_json(p.item for p in read.prompts)


def _of_json(values: Iterable[object]) -> str:
    total = hashlib.sha256()
    for value in values:
        total.update(json.dumps(value, sort_keys=True, allow_nan=False).encode())
        total.update(b"\n")
    return total.hexdigest()
