"""What tells whether two processes, or a run and its resume, read the same data."""

import dataclasses
from collections.abc import Sequence

from rollout_worker.data.prompts import PromptSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDigests:
    """sha256, hex, of everything that is read of data.train and data.eval.

    Where data.train has several sources, or data.eval several sets, each has a digest of its own;
    blanks part them.

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
        """What differs, such as `answers of data.eval`, or `prompts of data.train.1` where that is
        the only one of several sources; of two sets with other prompts, only these.
        """
        names = [each.name for each in dataclasses.fields(self)]
        different = [name for name in names if getattr(self, name) != getattr(other, name)]
        # Another answer is another record too: the first of a set says the most.
        first = {name.startswith("eval_"): name for name in reversed(different)}
        return [
            part_of_data(name) + _only_part(getattr(self, name), getattr(other, name))
            for name in different
            if name in first.values()
        ]


def part_of_data(name: str) -> str:
    """What a field of DataDigests covers, such as `answers of data.eval`."""
    part = name.removeprefix("eval_")
    return f"{part} of data.{'train' if part == name else 'eval'}"


def _only_part(one: str, other: str) -> str:
    """`.1` where the second of several is the only one that differs; else empty."""
    ours, theirs = one.split(), other.split()
    if len(ours) != len(theirs) or len(ours) == 1:
        return ""
    different = [place for place, mine in enumerate(ours) if mine != theirs[place]]
    return f".{different[0]}" if len(different) == 1 else ""


def digest_data(train: Sequence[PromptSet], held_out: Sequence[PromptSet] = ()) -> DataDigests:
    """Computes the digests; a run without data.eval has those of an empty set.

    Args:
        train: the prompts of each training source.
        held_out: of each held-out set.
    """
    prompts, answers, records = _joined(train)
    none = PromptSet(prompts=(), overlong=0)
    eval_prompts, eval_answers, eval_records = _joined(held_out or [none])
    return DataDigests(
        prompts=prompts,
        answers=answers,
        records=records,
        eval_prompts=eval_prompts,
        eval_answers=eval_answers,
        eval_records=eval_records,
    )


def _joined(sets: Sequence[PromptSet]) -> tuple[str, str, str]:
    """Of prompts, answers and records, those of all sets in one text."""
    hashes = [one.hashes for one in sets]
    return (
        " ".join(each.prompts for each in hashes),
        " ".join(each.answers for each in hashes),
        " ".join(each.records for each in hashes),
    )
