"""Sources of prompts, and what broken ones get."""

import datetime
import decimal
import json
import sys
import tempfile
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rollout_worker.config.data_config import MixedSource, SourceConfig
from rollout_worker.data.prompts import count_shared, load_prompts
from rollout_worker.data.records import records


class Letters:
    """One token per character of the whole conversation, roles included."""

    def encode_chat(self, messages, *, tools=()):
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
    def refuse(self, messages, *, tools=()):
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
        ('{"question": "q", "answer": NaN}', "line 3: NaN is not a JSON number"),
        (
            '{"questoin": "q", "answer": "1"}',
            "line 3: has no field 'question', 'prompt' or 'messages' .nearest: 'questoin'",
        ),
        ('{"question": "q", "answer": true}', "line 3: field 'answer' must be text or a number"),
        ('{"question": " ", "answer": "1"}', "line 3: field 'question' is empty"),
        ('{"question": "q", "answer": "so ####"}', "line 3: nothing follows the last ####"),
        (r'{"question": "\ud800", "answer": "1"}', "line 3: field 'question' has the lone surr"),
        (
            r'{"question": "q", "answer": "1", "notes": [{"by": "x\udfff"}]}',
            r"line 3: field 'notes' has the lone surrogate '.udfff' at character 1",
        ),
        (r'{"question": "q", "answer": "1", "\ud800": 1}', "line 3: a key has the lone surr"),
        (
            '{"question": "q", "answer": "1", "answer": "2"}',
            "line 3: key 'answer' stands in it more than once: correct the record",
        ),
        (
            f'{{"question": "q", "answer": 1{5_000 * "0"}}}',
            "line 3: 1000.* is a number of 5,001 digits: write it as text",
        ),
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


def test_a_folder_is_not_called_missing(tmp_path):
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(ValueError, match="train.jsonl is a folder: name one file of it"):
        load(tmp_path / "train.jsonl")


def test_a_negative_seed_is_refused_since_its_items_are_those_of_a_positive_one():
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        SourceConfig(source="reasoning_gym:chain_sum", size=2, seed=-1)


@pytest.mark.parametrize(
    "line, message",
    [
        ({"question": "q"}, r"has no field 'right', only \['question'\]: set .*answer_field"),
        ({"question": "q", "right": None}, "field 'right' must be text or a number, got None"),
        ({"question": "q", "right": ""}, "field 'right' is empty: fill it in"),
        ({"question": "q", "right": " \n"}, "field 'right' is empty"),
    ],
)
def test_an_answer_field_that_is_named_must_hold_an_answer(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "right": "1"}, line])
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}"):
        load(path, answer_field="right")


def test_an_empty_file_and_too_large_a_skip_are_refused(tmp_path):
    with pytest.raises(ValueError, match="empty.jsonl has no records: fill it, or"):
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
    record = RECORDS[0] | {"when": datetime.date(2024, 5, 1), "bad": float("nan"), "raw": b"x"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    item = load(tmp_path / "a.parquet").prompts[0].item
    assert json.loads(json.dumps(item, allow_nan=False)) == item
    assert item["when"] == "2024-05-01" and item["bad"] is None and item["raw"] == "x"


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="cut.parquet cannot be read as Parquet"):
        load(tmp_path / "cut.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": 1}]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet, row 0: has no field 'question'"):
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
    with pytest.raises(ValueError, match=r"bytes.parquet, row 1, column 'question' is not UTF-8 "):
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


def load_columns(path, columns, **keys):
    pyarrow.parquet.write_table(pyarrow.table(columns), path / "a.parquet")
    return load(path / "a.parquet", **keys)


BYTES = pyarrow.array([b"4 - 2 =", "caf\u00e9".encode()])


@pytest.mark.parametrize(
    "cells",
    [
        BYTES,
        BYTES.cast(pyarrow.large_binary()),
        BYTES.dictionary_encode(),
        pyarrow.array(["4 - 2 =", "caf\u00e9"]).dictionary_encode(),
        pyarrow.array([b"4 - 2 =", b"caf\xc3\xa9"]).cast(pyarrow.binary_view()),
    ],
    ids=["binary", "large_binary", "dictionary of binary", "dictionary of text", "binary_view"],
)
def test_bytes_are_the_text_that_they_spell_N01(tmp_path, cells):
    as_question = load_columns(tmp_path, {"question": cells, "answer": ["1", "2"]})
    assert [each.question for each in as_question.prompts] == ["4 - 2 =", "caf\u00e9"]
    assert as_question.prompts[1].item["question"] == "caf\u00e9"
    as_answer = load_columns(tmp_path, {"question": ["q", "r"], "answer": cells})
    assert [each.answer for each in as_answer.prompts] == ["4 - 2 =", "caf\u00e9"]


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.binary(2), pyarrow.large_binary()])
@pytest.mark.parametrize("field", ["question", "answer"])
def test_bytes_that_are_no_text_are_refused_with_file_row_and_column_N01(tmp_path, kind, field):
    columns = {"question": ["q", "r"], "answer": ["1", "2"]}
    columns[field] = pyarrow.array([b"ok", b"\xff\xfe"], kind)
    with pytest.raises(ValueError, match=f"a.parquet, row 1, column '{field}' is not UTF-8"):
        load_columns(tmp_path, columns)


@pytest.mark.parametrize(
    "kind, values, texts",
    [
        (pyarrow.float32(), [0.1, 2.35, 12.7, 5], ["0.1", "2.35", "12.7", "5"]),
        (pyarrow.float16(), [0.1, 2.35, 1024, -0.5], ["0.1", "2.35", "1024", "-0.5"]),
        (pyarrow.float64(), [0.1, 5, 1e20, 1e-7], ["0.1", "5", f"1{20 * '0'}", "0.0000001"]),
        (
            pyarrow.decimal128(4, 2),
            [decimal.Decimal("1.50"), decimal.Decimal("-3.00")],
            ["1.50", "-3.00"],
        ),
        (pyarrow.decimal128(10, 7), [decimal.Decimal(0)], ["0.0000000"]),
        (pyarrow.date32(), [datetime.date(2024, 5, 1)], ["2024-05-01"]),
        (pyarrow.uint64(), [2**64 - 1], ["18446744073709551615"]),
    ],
)
def test_a_number_has_the_shortest_text_of_its_stored_type_N04(tmp_path, kind, values, texts):
    values = [np.float16(value) for value in values] if kind == pyarrow.float16() else values
    cells = pyarrow.array(values, kind)
    got = load_columns(tmp_path, {"question": cells, "answer": cells})
    assert [each.answer for each in got.prompts] == texts
    assert [each.question for each in got.prompts] == texts


def test_a_json_number_keeps_its_digits(tmp_path):
    digits = ["0.1234567890123456789", "5.0", "1e20", "12345678901234567890.5"]
    lines = [f'{{"question": "q", "answer": {each}, "note": {each}}}' for each in digits]
    got = load(write(tmp_path / "a.jsonl", lines))
    expected = [digits[0], "5.0", f"1{20 * '0'}", digits[3]]
    assert [each.answer for each in got.prompts] == expected
    assert [each.item["note"] for each in got.prompts] == [float(each) for each in digits]


@pytest.mark.parametrize("digits", ["1e400", "-1e999999", "1e-999999", "1e99999999999999999999"])
def test_a_json_number_out_of_range_is_refused(tmp_path, digits):
    path = write(tmp_path / "a.jsonl", [f'{{"question": "q", "answer": {digits}}}'])
    with pytest.raises(ValueError, match="a.jsonl, line 1"):
        load(path)


NANOSECONDS = {
    "made": (pyarrow.timestamp("ns"), "2023-11-14T22:13:20.123456789"),
    "seen": (pyarrow.timestamp("ns", "Europe/Berlin"), "2023-11-14T22:13:20.123456789Z"),
    "took": (pyarrow.duration("ns"), "PT1700000000.123456789S"),
}


@pytest.mark.parametrize("column", NANOSECONDS)
def test_nanoseconds_that_nobody_needs_load_without_pandas_N02(tmp_path, monkeypatch, column):
    monkeypatch.setitem(sys.modules, "pandas", None)
    kind, text = NANOSECONDS[column]
    cells = pyarrow.array([1_700_000_000_123_456_789, None], kind)
    columns = {"question": ["q", "r"], "answer": ["1", "2"], column: cells}
    got = load_columns(tmp_path, columns)
    assert [each.item[column] for each in got.prompts] == [text, None]
    with pytest.raises(ValueError, match=f"a.parquet, row 0, column '{column}' is of type"):
        load_columns(tmp_path, columns, answer_field=column)


def test_cells_without_a_form_in_json_are_null_where_nobody_needs_them(tmp_path):
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("score", pyarrow.float32())])
    columns = {
        "question": ["q"],
        "answer": ["1"],
        "image": pyarrow.array([{"bytes": b"\x89PNG", "score": 0.1}], struct),
        "tags": pyarrow.array([[b"a", None, b"\xff"]], pyarrow.list_(pyarrow.binary())),
        "pairs": pyarrow.array([[("k", 0.1)]], pyarrow.map_(pyarrow.string(), pyarrow.float32())),
        "nothing": pyarrow.nulls(1),
    }
    item = load_columns(tmp_path, columns).prompts[0].item
    assert item["image"] == {"bytes": None, "score": 0.1}
    assert item["tags"] == ["a", None, None]
    assert item["pairs"] == [["k", 0.1]] and item["nothing"] is None


OUT_OF_RANGE = {
    "day": pyarrow.scalar(2**31 - 1, pyarrow.date32()),
    "time": pyarrow.scalar(90_000_000, pyarrow.int32()).cast(pyarrow.time32("ms")),
    "moment": pyarrow.scalar(2**63 - 1, pyarrow.timestamp("us", "UTC")),
}


@pytest.mark.parametrize("column", OUT_OF_RANGE)
def test_a_date_or_time_that_no_calendar_shows_is_null_and_no_answer(tmp_path, column):
    columns = {"question": ["q"], "answer": ["1"], column: pyarrow.repeat(OUT_OF_RANGE[column], 1)}
    assert load_columns(tmp_path, columns).prompts[0].item[column] is None
    if column != "moment":
        with pytest.raises(ValueError, match=f"row 0: field '{column}' must be text or a number"):
            load_columns(tmp_path, columns, answer_field=column)


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([["q"], ["5"], ["6"]], ["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 0, has several columns called 'answer': rename all"):
        load(tmp_path / "a.parquet")


def test_a_boolean_of_eight_bits_is_a_boolean(tmp_path):
    cells = pyarrow.ExtensionArray.from_storage(pyarrow.bool8(), pyarrow.array([1], "int8"))
    columns = {"question": ["q"], "answer": ["1"], "flag": cells}
    assert load_columns(tmp_path, columns).prompts[0].item["flag"] is True
    with pytest.raises(ValueError, match="row 0: field 'flag' must be text or a number"):
        load_columns(tmp_path, columns, answer_field="flag")


@pytest.mark.parametrize("value", [True, [1], {"a": 1}])
def test_a_cell_that_is_neither_text_nor_number_is_no_answer(tmp_path, value):
    with pytest.raises(ValueError, match="row 0: field 'answer' must be text or a number"):
        load_columns(tmp_path, {"question": ["q"], "answer": pyarrow.array([value])})


def test_no_object_reaches_a_record_as_its_repr(monkeypatch):
    class Odd:
        pass

    record = {"question": "q", "answer": "1", "metadata": {"odd": Odd(), "half": np.float32(0.1)}}
    monkeypatch.setattr(
        "rollout_worker.data.records.make_dataset", lambda *_, size, **__: [record] * size
    )
    item = load("reasoning_gym:any", size=1).prompts[0].item
    assert item["metadata"] == {"odd": None, "half": 0.1}
    record["answer"] = Odd()
    with pytest.raises(ValueError, match="item 0: field 'answer' must be text or a number"):
        load("reasoning_gym:any", size=1)


@pytest.mark.parametrize(
    "task", ["rush_hour", "boxnet", "graph_color", "propositional_logic", "rubiks_cube"]
)
def test_a_task_without_a_single_answer_loads_N06(task):
    got = load(f"reasoning_gym:{task}", size=2)
    assert [each.answer for each in got.prompts] == ["", ""]


LARGE = 2**14
"""Bytes of a record of which few are in memory."""


def large_rows(count):
    return [{"question": f"q{i}", "answer": str(i), "tests": "x" * LARGE} for i in range(count)]


def test_memory_does_not_hold_the_records_of_a_source(tmp_path):
    path = write(tmp_path / "large.jsonl", large_rows(1000))
    tracemalloc.start()
    try:
        got = load(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 250 * LARGE
    assert [len(got.prompts[i].item["tests"]) for i in (0, 999, -1)] == [LARGE] * 3


def test_memory_does_not_hold_the_rows_of_a_parquet_file(tmp_path):
    path = tmp_path / "large.parquet"
    table = pyarrow.Table.from_pylist(large_rows(1500))
    pyarrow.parquet.write_table(table, path, use_dictionary=False, write_batch_size=16)
    del table
    before = pyarrow.total_allocated_bytes()
    read = records(SourceConfig(source=str(path)))
    held = [pyarrow.total_allocated_bytes() - before for _ in read]
    assert len(held) == 1500 and max(held) < 750 * LARGE


def test_a_prompt_is_the_same_whenever_it_is_read(tmp_path):
    record = {
        "question": 'Grüße,\n\u2028"quoted" \x00?',
        "answer": "\U0001f600",
        "deep": {"z": [1, 1.5, -0.0, 1e-300, 12345678901234567890, True, None, {}], "a": []},
    }
    got = load(write(tmp_path / "a.jsonl", [RECORDS[1], record, RECORDS[2]]))
    once, again = got.prompts[1], got.prompts[1]
    assert once.item == record and list(once.item) == list(record) and again.item == record
    assert (once.prompt_id, once.question, once.answer) == (1, record["question"], record["answer"])
    assert once.token_ids.tolist() == again.token_ids.tolist()
    with pytest.raises(ValueError, match="read-only"):
        once.token_ids[0] = 1
    assert [one.prompt_id for one in got.prompts[::-1]] == [2, 1, 0]
    assert list(got.indices) == [0, 1, 2]


def test_prompts_that_do_not_fit_on_the_disk_are_refused_with_the_folder(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", RECORDS)
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        with pytest.raises(
            ValueError, match="a.jsonl: its records do not fit in .*No space.*TMPDIR"
        ):
            load(path)


def test_rows_of_a_stream_are_those_of_the_whole_and_no_more_are_fetched(monkeypatch):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(
        [{"question": f"q{i}", "answer": str(i)} for i in range(2000)]
    )
    fetched = []

    class Stream:
        """Rows as they arrive; neither their number nor their columns are known before."""

        def with_format(self, kind):
            assert kind == "arrow"
            return self

        def iter(self, batch_size):
            for table in whole.with_format("arrow").iter(batch_size):
                fetched.append(table.num_rows)
                yield table

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, streaming=False, **__: Stream() if streaming else whole
    )
    keys = {"source": "some/stream", "skip": 20, "size": 30}
    stream, read = load(streaming=True, **keys), load(**keys)
    assert [p.prompt_id for p in stream.prompts] == list(range(20, 50))
    assert stream.hashes == read.hashes and stream.indices == read.indices
    assert sum(fetched) < 1000
    assert len(load(source="some/stream", skip=1990, size=30, streaming=True)) == 10


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"source": "some/data"}, "needs size: an epoch is a shuffle of all prompts .*set size"),
        ({"source": "a.jsonl", "size": 3}, "'a.jsonl', which is read item by item anyway: remove"),
        ({"source": "a.parquet", "size": 3}, "streaming=true is for HF datasets"),
        ({"source": "reasoning_gym:chain_sum", "size": 3}, "streaming=true is for HF datasets"),
    ],
)
def test_streaming_that_cannot_be_repeated_or_has_no_effect_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(streaming=True, **keys)


def test_a_stream_and_its_whole_are_the_same_source():
    one, other = (MixedSource(source="a/b", size=3, streaming=each) for each in (True, False))
    assert one.content == other.content


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_with_files_of_a_dataset_is_read(tmp_path, monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "a dataset"
    folder.mkdir()
    write(folder / "train-0.jsonl", RECORDS[:2])
    write(folder / "train-1.jsonl", RECORDS[2:])
    write(folder / "test.jsonl", RECORDS[4:])
    got = load(folder, size=4, streaming=streaming)
    assert [p.item for p in got.prompts] == RECORDS[:4]
    assert [p.item for p in load(folder, size=4, split="test", streaming=streaming).prompts] == (
        RECORDS[4:]
    )
    with pytest.raises(ValueError, match="a dataset' .*split='nope'.* cannot be loaded"):
        load(folder, size=4, split="nope", streaming=streaming)


def test_what_save_to_disk_wrote_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(RECORDS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([3])}).save_to_disk(tmp_path / "both")
    assert [p.item for p in load(tmp_path / "one").prompts] == RECORDS
    assert [p.item for p in load(tmp_path / "both", split="test").prompts] == RECORDS[3:4]
    with pytest.raises(ValueError, match=r"Bad split: nope. Available splits: \['test', 'train'\]"):
        load(tmp_path / "both", split="nope")
