"""Several training sources as one set of prompts."""

import json

import pytest

from rollout_worker.config.data_config import DataConfig
from rollout_worker.data.data_digests import digest_data
from rollout_worker.data.training_set import load_training, order_of


class Letters:
    """One token per character."""

    def encode_chat(self, messages, *, tools=()):
        return [ord(c) for message in messages for c in message["content"]]


@pytest.fixture
def load(tmp_path):
    """Writes the questions of each source and reads them as a run does."""

    def make(sources, limit=10_000, **keys):
        train = []
        for name, questions in sources.items():
            records = [{"question": q, "answer": str(i)} for i, q in enumerate(questions)]
            lines = [json.dumps(record) + "\n" for record in records]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
            train.append({"source": str(tmp_path / f"{name}.jsonl")} | keys.get(name, {}))
        data = DataConfig.model_validate({"train": train})
        return data, load_training(data, tokenizer=Letters(), max_prompt_tokens=limit)

    return make


SOURCES = {"a": ["a0", "a1", "a2"], "b": ["b0", "b1 long"], "c": ["c0"]}


def test_prompts_follow_source_by_source_with_ids_and_names_of_their_own(load):
    _, train = load(SOURCES)
    found = [(p.prompt_id, p.source, p.question) for p in train.prompts]
    assert found == [
        *[(0, "a", "a0"), (1, "a", "a1"), (2, "a", "a2")],
        *[(3, "b", "b0"), (4, "b", "b1 long"), (5, "c", "c0")],
    ]
    assert len(train) == 6 and [one.first_id for one in train.sets] == [0, 3, 5]


def test_ids_stay_whatever_the_length_bound_and_skip_leave_out(load):
    _, train = load(SOURCES, limit=2)
    assert [(p.prompt_id, p.question) for p in train.prompts] == [
        *[(0, "a0"), (1, "a1"), (2, "a2"), (3, "b0"), (5, "c0")]
    ]
    assert [one.overlong for one in train.sets] == [0, 1, 0]
    _, train = load(SOURCES, a={"skip": 2}, b={"size": 1})
    assert [(p.prompt_id, p.question) for p in train.prompts] == [(2, "a2"), (3, "b0"), (4, "c0")]


def test_the_order_has_count_weight_and_name_of_each_source(load):
    data, train = load(SOURCES, a={"weight": 5, "name": "sums"}, b={"weight": 3}, c={"weight": 2})
    order = order_of(data, train.sets, seed=7)
    assert [(one.name, one.count, one.weight) for one in order.sources] == [
        *[("sums", 3, 5), ("b", 2, 3), ("c", 1, 2)]
    ]
    names = [train.prompts[order.prompt_at(index)[1]].source for index in range(10)]
    assert names == [order.source_at(index).name for index in range(10)]


def test_a_list_of_one_source_is_that_source(load):
    data, several = load({"a": SOURCES["a"]})
    one = DataConfig.model_validate({"train": {"source": data.train_sources[0].source}})
    alone = load_training(one, tokenizer=Letters(), max_prompt_tokens=99)
    assert digest_data(alone.sets) == digest_data(several.sets)
    assert [p.source for p in several.prompts] == ["", "", ""]
    mixtures = [order_of(d, t.sets, seed=1).mixture() for d, t in ((data, several), (one, alone))]
    assert mixtures[0] == mixtures[1]


def test_an_error_names_the_source(load):
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: field 'question' is empty"):
        load(SOURCES | {"b": ["b0", " "]})


def digests(load, sources):
    return digest_data(load(sources)[1].sets)


def test_what_differs_is_named_with_its_source(load):
    mine = digests(load, SOURCES)
    assert mine.differences(digests(load, SOURCES)) == []
    for name, place in (("a", 0), ("b", 1), ("c", 2)):
        other = digests(load, SOURCES | {name: ["x", *SOURCES[name]]})
        assert mine.differences(other) == [f"prompts of data.train.{place}"]
    both = digests(load, SOURCES | {"a": ["x"], "c": ["y"]})
    assert mine.differences(both) == ["prompts of data.train"]
    fewer = digests(load, {"a": SOURCES["a"]})
    assert mine.differences(fewer) == ["prompts of data.train"]


def test_a_record_that_moved_from_one_source_to_the_next_differs(load):
    moved = {"a": ["a0", "a1"], "b": ["a2", "b0", "b1 long"], "c": ["c0"]}
    assert digests(load, SOURCES).differences(digests(load, moved)) == ["prompts of data.train"]
