"""What is checked before supervised training starts, and what it would do."""

import json

import pytest

from deploy.demo import make_model
from driver.config.load_config import ConfigError, load_as
from driver.sft.sft_config import SftConfig
from driver.sft.sft_plan import plan_training
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("plan") / "model")


@pytest.fixture
def plan(model, tmp_path):
    """Plans a training on some records, with overrides."""

    def make(records, *overrides, held_out=None):
        sets = {"data.train.source": records, "data.eval.source": held_out}
        given = [f"model.path={model}", "batch.max_tokens=40", "batch.sequences_per_step=4"]
        for key, rows in sets.items():
            if rows is not None:
                file = tmp_path / f"{key}.jsonl"
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                given.append(f"{key}={file}")
        devices = ("learner.mesh.data=1", "learner.mesh.fsdp=-1")
        return plan_training(load_as(SftConfig, None, [*given, *devices, *overrides]))

    return make


def rows(count):
    return [{"prompt": f"{i}+1", "completion": f"{i + 1}"} for i in range(count)]


def test_the_report_says_what_it_would_do(plan):
    made = plan([*rows(6), {"prompt": "7", "completion": "9" * 50}], held_out=rows(1))
    assert "2 steps of 4 records, 1.33 epochs of 6 records" in made.text
    # A short record has 23 tokens; the long one 2 less of prompt and 49 more of completion.
    assert "6 records" in made.text and "; 138 tokens" in made.text
    assert "1 left out with more than batch.max_tokens=40 tokens (the longest has 70)" in made.text
    assert "note: also in data.train: 1 record of data.eval" in made.text
    assert made.steps == 2 and len(made.train) == 6 and len(made.held_out["eval/loss"]) == 1
    # "0+1</s>" and its header, then "1</s>": two tokens of each train.
    assert "of which 12 train" in made.text


@pytest.mark.parametrize(
    "overrides, steps",
    [((), 3), (("run.epochs=2",), 5), (("run.epochs=0.4",), 1), (("run.steps=7",), 7)],
)
def test_epochs_become_steps_of_whole_batches(plan, overrides, steps):
    assert plan(rows(10), *overrides).steps == steps


def test_every_epoch_visits_every_record_once_in_an_order_of_its_own(plan):
    made = plan(rows(8), "run.epochs=3")
    visited = [[one.group_id for step in (e, e + 1) for one in made.batch(step)] for e in (1, 3, 5)]
    assert [sorted(names) for names in visited] == [sorted(f"record {i}" for i in range(8))] * 3
    assert visited[0] != visited[1] != visited[2]
    again = plan(rows(8), "run.epochs=3")
    assert [one.group_id for one in again.batch(2)] == [one.group_id for one in made.batch(2)]
    assert plan(rows(8), "run.seed=1").batch(1) != made.batch(1)


def test_without_shuffling_records_come_as_they_stand_in_every_epoch(plan):
    made = plan(rows(8), "run.epochs=2", "batch.shuffle=false")
    names = [[one.group_id for one in made.batch(step)] for step in (1, 2, 3, 4)]
    assert names == [[f"record {i}" for i in part] for part in (range(4), range(4, 8))] * 2


def test_sources_are_mixed_by_weight(plan, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 5}) + "\n")
    sources = [f"data.train.{i}.source={tmp_path / n}.jsonl" for i, n in enumerate("ab")]
    made = plan(None, *sources, "data.train.0.weight=3", "run.steps=1")
    names = [bytes(one.token_ids.astype("uint8")) for one in made.batch(1)]
    assert len(names) == 4 and len(set(names)) == 2
    assert sorted(map(names.count, set(names))) == [1, 3]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("batch.max_tokens=300",), "max_tokens=300 positions, .*max_position_embeddings=256"),
        (("learner.optimizer.warmup_steps=3",), "warmup_steps=3 must be below the 3 steps"),
        (("learner.mesh.data=3",), "learner.mesh.data=3"),
        (("data.system_prompt=Brief.", "model.chat_template=x"), "leaves the user's text out"),
        (("data.template_args.think=true",), "does not read think"),
        (("data.train.source=/none.jsonl",), "data file /none.jsonl does not exist"),
        (("model.path=/none",), "model.path=/none"),
    ],
)
def test_what_cannot_work_is_refused_before_any_device_is_touched(plan, overrides, message):
    with pytest.raises(ConfigError, match=message):
        plan(rows(10), *overrides)


def test_turns_that_do_not_end_are_noted(plan):
    open_ended = CHAT_TEMPLATE.replace(" + '</s>'", " + '|'")
    made = plan(rows(4), f"model.chat_template={open_ended}")
    assert "4 of 4 records have a turn that trains without a stop token at its end" in made.text


def test_a_template_that_rewrites_history_is_refused_with_the_record(plan):
    strips = CHAT_TEMPLATE.replace(
        "message['content']", "(message['content'] if loop.last else '')"
    )
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ConfigError, match=r"data.train: .*line 1: .*leaves message|rewrites"):
        plan([{"messages": turns}], f"model.chat_template={strips}")


def test_the_demo_model_is_planned_with_the_words_of_its_run(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "4 - 9 =", "completion": "#### -5"}) + "\n")
    config = load_as(
        SftConfig,
        None,
        [
            f"model.path={make_model.OUTPUT}",
            f"data.train.source={file}",
            f"data.system_prompt={make_model.SYSTEM_PROMPT}",
            "batch.max_tokens=76",
        ],
    )
    (example,) = plan_training(config).train
    trained = example.token_ids[example.trains]
    assert plan_training(config).tokenizer.decode(trained) == "#### -5<|im_end|>"
