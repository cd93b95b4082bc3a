"""Sources of prompts, and what broken ones get."""

import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rollout_worker.config import SourceConfig
from rollout_worker.data.prompts import count_shared, load_prompts


class Letters:
    """One token per character of the whole conversation, roles included."""

    def encode_chat(self, messages):
        return [ord(c) for message in messages for c in f"{message['role']}:{message['content']}\n"]


def load(source, *, system_prompt=None, template="{question}", limit=10_000, **keys):
    return load_prompts(
        SourceConfig(source=str(source), **keys),
        tokenizer=Letters(),
        system_prompt=system_prompt,
        question_template=template,
        max_prompt_tokens=limit,
    )


def write(path, records):
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


RECORDS = [{"question": f"q{'!' * i}", "answer": str(i), "level": i} for i in range(5)]


def test_jsonl_records_become_prompts(tmp_path):
    got = load(
        write(tmp_path / "a.jsonl", RECORDS), system_prompt="Be right.", template="<{question}>"
    )
    assert [prompt.prompt_id for prompt in got.prompts] == [0, 1, 2, 3, 4]
    second = got.prompts[1]
    assert second.question == "q!" and second.answer == "1" and second.item == RECORDS[1]
    assert second.token_ids.dtype == np.int32
    assert "".join(map(chr, second.token_ids)) == "system:Be right.\nuser:<q!>\n"


def test_overlong_prompts_are_counted_and_ids_stay(tmp_path):
    records = [RECORDS[2], RECORDS[0], RECORDS[4], RECORDS[1]]
    got = load(
        write(tmp_path / "a.jsonl", records), limit=len("user:q!\n")
    )  # the first has one more
    assert [prompt.prompt_id for prompt in got.prompts] == [1, 3]
    assert got.overlong == 2 and len(got) == 2


def test_a_source_of_which_nothing_fits_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(
        ValueError,
        match="all 5 prompts are longer than max_prompt_tokens=3; the shortest has 7 tokens",
    ):
        load(path, limit=3)


def test_skip_and_size_choose_a_range_by_index(tmp_path):
    path = write(tmp_path / "a.jsonl", [*RECORDS, "not JSON, but never reached"])
    assert [p.prompt_id for p in load(path, skip=1, size=3).prompts] == [1, 2, 3]
    assert [p.prompt_id for p in load(path, size=2).prompts] == [0, 1]


def test_a_template_may_hold_other_braces(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "{x}", "answer": "1"}])
    got = load(path, template="{question} in {braces}")
    assert "".join(map(chr, got.prompts[0].token_ids)) == "user:{x} in {braces}\n"


def test_gsm8k_gold_is_what_follows_the_marker(tmp_path):
    solution = "12*105=<<12*105=1260>>1,260\n#### 3,780"
    path = write(tmp_path / "a.jsonl", [{"q": "?", "a": solution}, {"q": "?", "a": 7}])
    got = load(path, question_field="q", answer_field="a")
    assert [prompt.answer for prompt in got.prompts] == ["3780", "7"]
    assert got.prompts[0].item["a"] == solution


def test_a_record_that_the_template_or_tokenizer_refuses_is_named(tmp_path, monkeypatch):
    def refuse(self, messages):
        if "!!" in messages[-1]["content"]:
            raise ValueError("'</s>' cannot be encoded as text")
        return [1]

    monkeypatch.setattr(Letters, "encode_chat", refuse)
    path = write(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ValueError, match="a.jsonl, line 3: '</s>' cannot be encoded as text"):
        load(path)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3 is not JSON .*each line must be one object, got b'{"),
        ("", "line 3 is empty: remove it"),
        ("[1]", "line 3 must be a JSON object with named fields, got list"),
        ('{"question": "q", "answer": NaN}', "line 3 is not JSON .NaN is not a JSON number"),
        (
            '{"question": "q"}',
            r"line 3 has no field 'answer', only \['question'\]: set .*answer_field",
        ),
        ('{"questoin": "q", "answer": "1"}', "line 3 has no field 'question' .nearest: 'questoin'"),
        ('{"question": "q", "answer": null}', "line 3: field 'answer' must be text or a number"),
        ('{"question": "q", "answer": true}', "line 3: field 'answer' must be text or a number"),
        ('{"question": " ", "answer": "1"}', "line 3: field 'question' is empty"),
        ('{"question": "q", "answer": "so ####"}', "line 3: nothing follows the last ####"),
        ('{"question": "q", "answer": ""}', "line 3: field 'answer' is empty: fill it in"),
        ('{"question": "q", "answer": " \\n"}', "line 3: field 'answer' is empty"),
        (r'{"question": "\ud800", "answer": "1"}', "line 3: field 'question' has the lone surr"),
        (
            r'{"question": "q", "answer": "1", "notes": [{"by": "x\udfff"}]}',
            r"line 3: field 'notes' has the lone surrogate '.udfff' at character 1",
        ),
        (r'{"question": "q", "answer": "1", "\ud800": 1}', "line 3: a key has the lone surr"),
        ("[" * 100_000, "line 3 is nested more than 64 levels deep"),
        (
            '{"question": "q", "answer": "1", "tree": ' + "[" * 70 + "]" * 70 + "}",
            "line 3: the record is nested more than 64 levels deep",
        ),
    ],
)
def test_a_broken_line_is_named_with_file_line_and_fix(tmp_path, line, message):
    path = write(tmp_path / "broken.jsonl", [RECORDS[0], RECORDS[1], line])
    with pytest.raises(ValueError, match=f"broken.jsonl, {message}"):
        load(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match="latin.jsonl, line 1 is not UTF-8"):
        load(path)


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "train.jsonl", RECORDS)
    with pytest.raises(ValueError, match=r"tran.jsonl does not exist .*nearest: 'train.jsonl'"):
        load(tmp_path / "tran.jsonl")


def test_an_empty_file_and_too_large_a_skip_are_refused(tmp_path):
    with pytest.raises(ValueError, match="empty.jsonl has no records$"):
        load(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(ValueError, match="has no records after the first 9: lower skip=9"):
        load(write(tmp_path / "a.jsonl", RECORDS), skip=9)


def test_parquet_gives_the_same_as_jsonl(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    from_parquet = load(tmp_path / "a.parquet", skip=1)
    from_jsonl = load(write(tmp_path / "a.jsonl", RECORDS), skip=1)
    assert [(p.prompt_id, p.item) for p in from_parquet.prompts] == [
        (p.prompt_id, p.item) for p in from_jsonl.prompts
    ]


def test_parquet_values_become_json_values(tmp_path):
    import datetime

    record = RECORDS[0] | {"when": datetime.date(2024, 5, 1), "bad": float("nan"), "raw": b"x"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    item = load(tmp_path / "a.parquet").prompts[0].item
    assert json.loads(json.dumps(item, allow_nan=False)) == item
    assert item["when"] == "2024-05-01" and item["bad"] is None


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="cut.parquet cannot be read as Parquet"):
        load(tmp_path / "cut.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": 1}]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet, row 0 has no field 'question'"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"source": "reasoning_gym:chain_sun", "size": 3},
            "no task 'chain_sun' .nearest: 'chain_sum'",
        ),
        ({"source": "reasoning_gym:chain_sum"}, "has no end: set size"),
        (
            {"source": "reasoning_gym:chain_sum", "size": 3, "params": {"min_term": 2}},
            "has no parameter 'min_term' .nearest: 'min_terms'",
        ),
        (
            {"source": "reasoning_gym:chain_sum", "size": 3, "params": {"size": 2}},
            "give size as the source's own key",
        ),
        (
            {"source": "reasoning_gym:chain_sum", "size": 3, "params": {"min_terms": 90}},
            "refuses {'min_terms': 90}: max_terms must be >= min_terms",
        ),
        ({"source": "data/train.csv"}, "is none of: reasoning_gym:<task>, a path"),
        ({"source": "some/where/else"}, "is none of: reasoning_gym:<task>, a path"),
    ],
)
def test_a_source_that_does_not_exist_is_refused_with_the_fix(keys, message):
    with pytest.raises(ValueError, match=message):
        load(**keys)


def test_reasoning_gym_ranges_do_not_depend_on_skip_or_size():
    keys = {"source": "reasoning_gym:chain_sum", "seed": 4, "params": {"max_terms": 3}}
    whole = load(size=10, **keys)
    part = load(size=3, skip=5, **keys)
    assert [p.prompt_id for p in part.prompts] == [5, 6, 7]
    assert [p.question for p in part.prompts] == [p.question for p in whole.prompts[5:8]]


def test_shared_questions_are_counted():
    keys = {"source": "reasoning_gym:chain_sum", "params": {"min_digits": 4, "max_digits": 4}}
    train = load(size=20, seed=0, **keys)
    assert count_shared(train, load(size=20, seed=0, skip=20, **keys)) == 0
    # The trap that it is there to find: neighbouring seeds give nearly the same items.
    assert count_shared(train, load(size=20, seed=1, **keys)) == 19


def test_a_hub_id_without_the_package_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets, or give a path"):
        load("openai/gsm8k", subset="main")


def test_a_hub_dataset_is_read_and_its_absence_explained(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(path, *, name, split):
        if (path, name, split) != ("openai/gsm8k", "main", "test"):
            raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    got = load("openai/gsm8k", subset="main", split="test", skip=2)
    assert [(p.prompt_id, p.item) for p in got.prompts] == list(enumerate(RECORDS))[2:]
    with pytest.raises(
        ValueError, match="split='train'. cannot be loaded: ConnectionError.*without network"
    ):
        load("openai/gsm8k", subset="main")


@pytest.mark.shared
def test_real_gsm8k(shared):
    got = load(shared / "data/gsm8k/test.jsonl")
    assert len(got) == 1319 and got.overlong == 0
    assert got.prompts[0].answer == "18" and got.prompts[2].answer == "70000"


def test_a_parquet_text_that_is_no_utf8_is_named(tmp_path):
    array = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table({"question": array, "answer": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "bytes.parquet")
    with pytest.raises(ValueError, match="bytes.parquet cannot be read as Parquet at row 0"):
        load(tmp_path / "bytes.parquet")


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"size": 10**9}, "= 1000000000 items of reasoning_gym:chain_sum, but at most 1000000"),
        ({"size": 10**6, "skip": 1}, "= 1000001 items"),
        ({"size": 10**20}, "less than or equal to"),
        ({"source": "a.jsonl", "params": {"x": 1}}, "belong to a reasoning_gym:<task> source"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**{"source": "reasoning_gym:chain_sum", **keys})


@pytest.mark.parametrize(
    "params, message",
    [
        ({"min_terms": "two"}, "parameter min_terms='two' must be of type int, got str"),
        ({"min_terms": True}, "parameter min_terms=True must be of type int, got bool"),
        ({"min_terms": 2.5}, "parameter min_terms=2.5 must be of type int, got float"),
        ({"allow_negation": 1}, "parameter allow_negation=1 must be of type bool, got int"),
    ],
)
def test_a_task_parameter_of_the_wrong_type_is_named(params, message):
    with pytest.raises(ValueError, match=message):
        load("reasoning_gym:chain_sum", size=1, params=params)
