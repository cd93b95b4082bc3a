"""A resume goes on with the run that the folder holds, or says why it cannot."""

import dataclasses
import datetime
import json

import pytest

from driver.config.load_config import load
from driver.config.resume_identity import (
    KEYS,
    AlreadyFinished,
    NotResumable,
    changed_settings,
    check_identity,
    identity_of,
    kept_moment,
    resolved,
    write_identity,
)
from models.config import ModelConfig
from rollout_worker.data.data_digests import DataDigests
from services.trajectories.data_order import DataOrder, OrderedSource

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)
MOMENT = datetime.datetime(
    2026, 1, 31, 23, 59, 59, tzinfo=datetime.timezone(datetime.timedelta(hours=-5))
)
ONE_SOURCE = DataOrder.of_one(0, 20)
SAME_DATA = {field.name: "abc" for field in dataclasses.fields(DataDigests)}
YAML = """
model: {path: models/mine}
data: {train: {source: train.jsonl}}
eval: {at_start: false, at_end: false}
"""


@pytest.fixture
def make(tmp_path):
    """Identities under changed settings, models and prompts."""
    file = tmp_path / "run.yaml"
    file.write_text(YAML)

    def one(*overrides, model=MODEL, order=ONE_SOURCE, teacher=None, **data):
        digests = DataDigests(**SAME_DATA | data)
        return identity_of(load(str(file), overrides), model, digests, order, teacher)

    return one


def test_the_same_run_may_go_on_with_other_rates_and_lengths(make, tmp_path):
    write_identity(tmp_path, make(), MOMENT)
    check_identity(tmp_path, make("run.steps=7", "learner.optimizer.learning_rate=1e-4"), steps=7)


@pytest.mark.parametrize(
    "overrides, changes, message",
    [
        (["run.seed=5"], {}, r"another seed \(0 then, 5 now\): put run.seed back"),
        (["learner.optimizer.name=sgd"], {}, "put learner.optimizer.name back"),
        ([], {"prompts": "abd"}, "other prompts of data.train: put the data back as it was"),
        ([], {"answers": "abd"}, "other answers of data.train: put .* or start a new run"),
        ([], {"records": "abd"}, "other records of data.train"),
        ([], {"eval_prompts": "abd", "eval_records": "x"}, "other prompts of data.eval: put"),
        (
            [],
            {"answers": "abd", "eval_answers": "x"},
            "other answers of data.train and answers of data.eval",
        ),
        ([], {"model": "eps"}, "put model.path back"),
        (
            [],
            {"teacher": "abd"},
            r"another teacher \(none then, abd now\): put algorithm.distillation.teacher and its",
        ),
    ],
)
def test_another_run_is_refused_with_the_key_to_put_back(
    make, tmp_path, overrides, changes, message
):
    if changes.get("model"):
        changes = {"model": dataclasses.replace(MODEL, rms_norm_eps=1e-4)}
    write_identity(tmp_path, make(), MOMENT)
    with pytest.raises(NotResumable, match=message):
        check_identity(tmp_path, make(*overrides, **changes), steps=100)


def test_a_folder_without_a_run_is_refused(make, tmp_path):
    with pytest.raises(NotResumable, match="has no run of this program"):
        check_identity(tmp_path, make(), steps=100)


def test_a_finished_run_says_how_to_train_on(make, tmp_path):
    write_identity(tmp_path, make(), MOMENT)
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "step": 100}))
    with pytest.raises(AlreadyFinished, match="run.steps a higher number"):
        check_identity(tmp_path, make(), steps=100)
    check_identity(tmp_path, make(), steps=101)


@pytest.mark.parametrize("name", ["identity.json", "status.json"])
@pytest.mark.parametrize("text", ["", "[]", '{"state": '])
def test_a_damaged_file_is_named(make, tmp_path, name, text):
    write_identity(tmp_path, make(), MOMENT)
    (tmp_path / name).write_text(text)
    with pytest.raises(NotResumable, match=f"{name} (cannot be read|is not a JSON object)"):
        check_identity(tmp_path, make(), steps=5)


def test_auto_resumes_where_there_is_a_run_and_starts_one_where_there_is_none(make, tmp_path):
    file = tmp_path / "run.yaml"
    config = load(str(file), ["run.resume=auto"])
    assert resolved(config, tmp_path).run.resume is False
    write_identity(tmp_path, make(), MOMENT)
    assert resolved(config, tmp_path).run.resume is True


def test_what_a_resume_changes_is_named():
    before = {"run": {"steps": 5, "resume": False}, "rollout": {"max_staleness": 2}, "eval": {}}
    now = {"run": {"steps": 9, "resume": True}, "rollout": {"max_staleness": 0, "x": [1]}}
    assert changed_settings(before, now) == [
        "rollout.max_staleness: 2 -> 0",
        "rollout.x: None -> [1]",
        "run.steps: 5 -> 9",
    ]
    assert changed_settings(now, now) == []


def test_the_moment_of_the_run_is_kept_with_its_time_zone_N16(make, tmp_path):
    assert kept_moment(tmp_path) is None
    write_identity(tmp_path, make(), MOMENT)
    kept = kept_moment(tmp_path)
    assert kept == MOMENT and kept.utcoffset() == MOMENT.utcoffset()


def test_a_run_of_an_older_program_has_no_moment_and_goes_on_N16(make, tmp_path):
    (tmp_path / "identity.json").write_text(json.dumps(make()))
    assert kept_moment(tmp_path) is None
    check_identity(tmp_path, make(), steps=100)


@pytest.mark.parametrize("kept", ["yesterday", "2026-01-31T12:00:00", 5])
def test_a_damaged_moment_is_named_N16(make, tmp_path, kept):
    (tmp_path / "identity.json").write_text(json.dumps({**make(), "moment": kept}))
    with pytest.raises(NotResumable, match="has moment=.*no time with its time zone.*restore it"):
        kept_moment(tmp_path)


def mixture(*weights, name="a"):
    return DataOrder(
        0,
        tuple(
            OrderedSource(name=f"{name}{i}", count=10 + i, weight=weight)
            for i, weight in enumerate(weights)
        ),
    )


def test_other_weights_of_the_sources_are_refused(make, tmp_path):
    write_identity(tmp_path, make(order=mixture(5, 3)), MOMENT)
    assert check_identity(tmp_path, make(order=mixture(0.5, 0.3, name="b")), steps=5) == []
    for other in (mixture(5, 2), mixture(5), mixture(5, 3, 1)):
        with pytest.raises(NotResumable, match="another mixture .10 prompts x 5/8, 11 prompts x"):
            check_identity(tmp_path, make(order=other), steps=5)


def test_a_run_of_an_older_program_has_one_source(make, tmp_path):
    old = {name: value for name, value in make().items() if name != "mixture"}
    write_identity(tmp_path, old, MOMENT)
    assert check_identity(tmp_path, make(), steps=5) == []
    with pytest.raises(NotResumable, match="mixture .one source then, 10 prompts x 1/2"):
        check_identity(tmp_path, make(order=mixture(1, 1)), steps=5)


def test_a_run_that_did_not_record_all_of_its_data_resumes_and_names_the_rest_N24(make, tmp_path):
    old = {name: value for name, value in make().items() if name in ("prompts", *KEYS)}
    write_identity(tmp_path, old, MOMENT)
    rest = [
        "answers of data.train",
        "records of data.train",
        "prompts of data.eval",
        "answers of data.eval",
        "records of data.eval",
    ]
    assert check_identity(tmp_path, make(answers="x", eval_prompts="y"), steps=5) == rest
    with pytest.raises(NotResumable, match="other prompts of data.train"):
        check_identity(tmp_path, make(prompts="x"), steps=5)
    write_identity(tmp_path, make(), MOMENT)
    assert check_identity(tmp_path, make(), steps=5) == []


def test_what_changed_in_a_list_of_sections_is_named_by_its_place():
    before = {"data": {"train": [{"source": "a", "skip": 0}, {"source": "b", "skip": 0}]}}
    after = {"data": {"train": [{"source": "a", "skip": 0}, {"source": "b", "skip": 3}]}}
    assert changed_settings(before, after) == ["data.train.1.skip: 0 -> 3"]


def test_a_run_of_a_program_without_teachers_goes_on_without_one(make, tmp_path):
    before = make()
    del before["teacher"]
    write_identity(tmp_path, before, MOMENT)
    assert check_identity(tmp_path, make(), steps=7) == []
    with pytest.raises(NotResumable, match="another teacher"):
        check_identity(tmp_path, make(teacher="abc"), steps=7)
