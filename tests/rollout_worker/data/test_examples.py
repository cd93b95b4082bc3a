"""Records of supervised training: the shapes that they come in, and what of them trains."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from deploy.demo.make_model import build_tokenizer
from rollout_worker.config.data_config import DataConfig
from rollout_worker.data.examples import load_examples

ASKED, SAID = {"role": "user", "content": "4 - 9 ="}, {"role": "assistant", "content": "-5"}
HEADER = "<|im_start|>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def load(tokenizer, tmp_path):
    """Loads records, with options of source and section."""

    def read(records, *, max_tokens=200, source=None, **data):
        file = tmp_path / "records.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        section = DataConfig.model_validate(
            {"train": {"source": str(file), **(source or {})}, **data}
        )
        return load_examples(
            section.train_sources[0], section, tokenizer=tokenizer, max_tokens=max_tokens
        )

    return read


def texts(tokenizer, example):
    """The whole text, and what trains of it."""
    trained = [i for i, t in zip(example.token_ids, example.trains, strict=True) if t]
    return tokenizer.decode(example.token_ids), tokenizer.decode(trained)


@pytest.mark.parametrize(
    "record, source",
    [
        pytest.param({"prompt": "4 - 9 =", "completion": "-5"}, {}, id="TRL, text"),
        pytest.param({"prompt": [ASKED], "completion": [SAID]}, {}, id="TRL, messages"),
        pytest.param({"messages": [ASKED, SAID]}, {}, id="a conversation"),
        pytest.param({"messages": [ASKED, SAID], "completion": None}, {}, id="null is absent"),
        pytest.param(
            {"question": "4 - 9 =", "answer": "-5"}, {"answer_field": "answer"}, id="GSM8K"
        ),
        pytest.param({"question": "4 - 9 =", "completion": -5}, {}, id="a number"),
        pytest.param({"chat": [ASKED, SAID]}, {"question_field": "chat"}, id="another name"),
    ],
)
def test_each_shape_gives_the_same_tokens(load, tokenizer, record, source):
    read = load([record], source=source)
    whole, trained = texts(tokenizer, read.examples[0])
    assert whole == f"{HEADER}user\n4 - 9 =<|im_end|>\n{HEADER}assistant\n-5<|im_end|>"
    assert trained == "-5<|im_end|>"
    assert (read.tokens, read.trained_tokens) == (len(read.examples[0].token_ids), 3)


def test_text_trains_whole_with_the_special_tokens_that_it_spells(load, tokenizer):
    read = load([{"text": f"{HEADER}user\n4"}])
    whole, trained = texts(tokenizer, read.examples[0])
    assert whole == f"{HEADER}user\n4<|im_end|>" and trained == whole.removeprefix(HEADER)


def test_system_prompt_and_question_template_are_those_of_a_run(load, tokenizer):
    records = [
        {"prompt": "4 - 9 =", "completion": "-5"},
        {"messages": [{"role": "system", "content": "Own."}, ASKED, SAID]},
    ]
    read = load(records, system_prompt="Give the answer.", question_template="Sum: {question}")
    first, second = (texts(tokenizer, one)[0] for one in read.examples)
    assert first.startswith(f"{HEADER}system\nGive the answer.<|im_end|>\n{HEADER}user\nSum: 4 - 9")
    assert second.startswith(f"{HEADER}system\nOwn.<|im_end|>\n{HEADER}user\n4 - 9")


def test_only_the_completion_of_a_prompt_with_history_trains(load, tokenizer):
    later = {"role": "user", "content": "and + 7?"}
    record = {"prompt": [ASKED, SAID, later], "completion": "2"}
    assert texts(tokenizer, load([record]).examples[0])[1] == "2<|im_end|>"
    both = {"messages": [ASKED, SAID, later, {"role": "assistant", "content": "2"}]}
    assert texts(tokenizer, load([both]).examples[0])[1] == "-5<|im_end|>2<|im_end|>"


def test_a_turn_of_weight_0_does_not_train(load, tokenizer):
    turns = [ASKED, SAID | {"weight": 0}, ASKED, SAID | {"weight": 1}]
    whole, trained = texts(tokenizer, load([{"messages": turns}]).examples[0])
    assert trained == "-5<|im_end|>" and whole.count("-5") == 2


def test_too_long_records_are_left_out_whole_and_counted(load):
    records = [{"prompt": "4", "completion": "9 " * count} for count in (1, 30, 2)]
    read = load(records, max_tokens=40)
    assert [one.row for one in read.examples] == [0, 2] and read.overlong == 1
    assert read.longest > 40 >= max(len(one.token_ids) for one in read.examples)


def test_a_record_of_exactly_the_limit_stays(load):
    record = {"prompt": "4", "completion": "9"}
    count = len(load([record]).examples[0].token_ids)
    assert load([record], max_tokens=count).overlong == 0
    with pytest.raises(
        ValueError, match=rf"all 1 records .*max_tokens={count - 1}.*shortest {count}"
    ):
        load([record], max_tokens=count - 1)


def test_parquet_holds_the_same_shapes(tokenizer, tmp_path):
    file = tmp_path / "records.parquet"
    table = pyarrow.Table.from_pylist(
        [{"messages": [ASKED | {"name": None}, SAID | {"name": "a"}]}, {"messages": [ASKED, SAID]}]
    )
    pyarrow.parquet.write_table(table, file)
    section = DataConfig.model_validate({"train": {"source": str(file)}})
    read = load_examples(section.train_sources[0], section, tokenizer=tokenizer, max_tokens=99)
    assert {texts(tokenizer, one)[1] for one in read.examples} == {"-5<|im_end|>"}


@pytest.mark.parametrize(
    "record, source, message",
    [
        ({"question": "4", "answer": "5"}, {}, r"no field 'completion'.*only \['answer', 'quest"),
        ({"prompt": "4", "answer": "5"}, {"answer_field": "anser"}, r"no field 'anser' \(nearest"),
        ({"completion": "5"}, {}, "a completion but no field 'question'"),
        ({"prompt": "4", "completion": " "}, {}, "field 'completion' is empty"),
        ({"prompt": "4", "completion": {"a": 1}}, {}, "must be text, a number or a list of"),
        ({"messages": [ASKED]}, {}, "no message of role 'assistant' to train on"),
        ({"messages": [ASKED, SAID | {"weight": 0}]}, {}, "to train on"),
        ({"messages": [ASKED, SAID | {"weight": 0.5}]}, {}, "weight=0.5, but a turn trains"),
        ({"messages": "4 - 9"}, {}, "field 'messages' must be a list of messages"),
        ({"messages": [ASKED, {"role": "bot", "content": "5"}]}, {}, "role='bot'"),
        ({"prompt": "4"}, {}, "has no field 'completion'"),
    ],
)
def test_a_record_that_cannot_train_is_named_with_the_fix(load, record, source, message):
    with pytest.raises(ValueError, match=rf"records.jsonl, line 2: .*{message}"):
        fine = {"prompt": "4", "completion": "5", "answer": "5"}
        load([fine | {name: "5" for name in source.values()}, record], source=source)


CHAT_TEXT, CALL_TEXT = (
    json.dumps(turns)
    for turns in ([ASKED, SAID], [{"role": "assistant", "tool_calls": [{"name": "add"}]}])
)


@pytest.mark.parametrize(
    "record, source, field",
    [
        ({"messages": CHAT_TEXT}, {}, "messages"),
        ({"prompt": CHAT_TEXT, "completion": "-5"}, {}, "prompt"),
        ({"prompt": "4 - 9 =", "completion": f" {CALL_TEXT}"}, {}, "completion"),
        ({"question": "4 - 9 =", "answer": CHAT_TEXT}, {"answer_field": "answer"}, "answer"),
        ({"chat": CHAT_TEXT}, {"question_field": "chat"}, "chat"),
        ({"text": CHAT_TEXT}, {}, "text"),
    ],
)
def test_messages_as_json_text_are_refused(load, record, source, field):
    rule = rf"field '{field}' has messages as JSON text, .*: write them as a list of messages"
    with pytest.raises(ValueError, match=rf"line 1: {rule}"):
        load([record], source=source)


@pytest.mark.parametrize("said", ['[{"name": "Ada", "role": "engineer"}]', "[1, 2]", '{"a": 1}'])
def test_a_completion_that_is_other_json_trains_as_it_stands(load, tokenizer, said):
    read = load([{"prompt": "4 - 9 =", "completion": said}])
    assert texts(tokenizer, read.examples[0])[1] == f"{said}<|im_end|>"


def test_an_empty_source_is_refused(load):
    with pytest.raises(ValueError, match="has no records after the first 1: lower skip=1"):
        load([{"prompt": "4", "completion": "5"}], source={"skip": 1})


def test_each_example_is_read_when_it_is_asked_for(load):
    records = [{"prompt": f"{n} - 9 =", "completion": "-5" * n} for n in range(1, 6)]
    read = load(records)
    for place in (0, 4, -2):
        once, again = read.examples[place], read.examples[place]
        assert once is not again and once.row == range(5)[place]
        assert once.token_ids.tolist() == again.token_ids.tolist()
        assert once.trains.tolist() == again.trains.tolist() and once.trains.dtype == bool
        with pytest.raises(ValueError, match="read-only"):
            once.token_ids[0] = 1
