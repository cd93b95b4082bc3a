"""What is read of the data is compared whole: prompts, answers, records, data.eval."""

import json

import pytest

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.data_digests import digest_data
from rollout_worker.data.prompts import load_prompts

SUMS = [
    {"question": "4 - 2 + 7 + 1 =", "answer": "10", "level": 1},
    {"question": "3 + 5 - 1 =", "answer": "7", "level": 2},
]


def digest_of(train, held_out):
    return digest_data([train], [held_out] if held_out else [])


class Letters:
    """One token per character."""

    def encode_chat(self, messages, *, tools=()):
        return [ord(c) for message in messages for c in message["content"]]


def read(source, **keys):
    return load_prompts(
        SourceConfig(source=str(source), **keys),
        tokenizer=Letters(),
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=10_000,
    )


@pytest.fixture
def sums(tmp_path):
    """A set of prompts of which one field of the last record has another value."""

    def make(**changes):
        path = tmp_path / "sums.jsonl"
        records = [SUMS[0], SUMS[1] | changes]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return read(path)

    return make


@pytest.mark.parametrize(
    "change, part",
    [
        ({"question": "3 + 5 - 2 ="}, "prompts"),
        ({"answer": "8"}, "answers"),
        ({"answer": "####8"}, "answers"),
        ({"level": 3}, "records"),
        ({"hint": None}, "records"),
        # The gold answer and the tokens are the same, but a scorer reads the record.
        ({"answer": "so\n#### 7"}, "records"),
    ],
)
def test_what_differs_is_named_with_its_set_N24_F4(sums, change, part):
    same, other = sums(), sums(**change)
    mine = digest_of(same, same)
    assert mine.differences(digest_of(sums(), sums())) == []
    assert mine.differences(digest_of(other, same)) == [f"{part} of data.train"]
    assert mine.differences(digest_of(same, other)) == [f"{part} of data.eval"]
    both = [f"{part} of data.train", f"{part} of data.eval"]
    assert mine.differences(digest_of(other, other)) == both


def test_a_held_out_set_that_is_missing_or_longer_differs(sums):
    train = sums()
    mine = digest_of(train, train)
    assert mine.differences(digest_of(train, None)) == ["prompts of data.eval"]
    assert digest_of(train, None).differences(digest_of(train, None)) == []


def test_another_order_of_fields_is_the_same_record(tmp_path, sums):
    mine = digest_of(sums(), None)
    lines = [json.dumps(dict(reversed(record.items()))) + "\n" for record in SUMS]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    assert mine == digest_of(read(tmp_path / "sums.jsonl"), None)


def test_other_parameters_of_a_task_differ(monkeypatch):
    keys = {"source": "reasoning_gym:chain_sum", "size": 2}
    mine = digest_of(read(**keys, params={"max_terms": 2, "min_terms": 2}), None)
    same = digest_of(read(**keys, params={"min_terms": 2, "max_terms": 2}), None)
    assert mine == same
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0")
    other = digest_of(read(**keys, params={"min_terms": 2, "max_terms": 2}), None)
    assert mine.differences(other) == ["records of data.train"]


def test_a_task_that_names_one_of_several_right_answers_is_no_difference(monkeypatch):
    def digests(answer):
        record = {"question": "from cat to dog", "answer": answer, "metadata": {"found": answer}}
        monkeypatch.setattr(
            "rollout_worker.data.records.make_dataset", lambda *_, size, **__: [record] * size
        )
        return digest_of(read("reasoning_gym:word_ladder", size=2), None)

    assert digests("cat,cot,cog,dog") == digests("cat,cot,dot,dog")


def test_of_several_held_out_sets_the_one_that_differs_is_named(sums):
    train, same, other = sums(), sums(), sums(answer="8")
    mine = digest_data([train], [same, same])
    assert mine.differences(digest_data([train], [same, same])) == []
    assert mine.differences(digest_data([train], [same, other])) == ["answers of data.eval.1"]
    assert mine.differences(digest_data([train], [other, same])) == ["answers of data.eval.0"]
    assert mine.differences(digest_data([train], [same])) == ["prompts of data.eval"]
