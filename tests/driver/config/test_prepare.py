"""What every run checks before it starts, and of every worker that joins."""

import json
import pathlib

import pytest

from driver.config.load_config import load
from driver.config.prepare import prepare
from driver.errors import RunError
from rollout_worker.data.data_digests import DataDigests
from rollout_worker.worker_records import WorkerInfo

DEMO = pathlib.Path(__file__).parents[3] / "deploy/demo/model"
YAML = """
model: {{path: {model}}}
data: {{train: {{source: {folder}/train.jsonl}}, eval: {{source: {folder}/eval.jsonl}}}}
rollout: {{max_prompt_tokens: 64, max_completion_tokens: 16, decode: {{slots: 8}}}}
eval: {{at_start: false, at_end: false}}
"""


@pytest.fixture
def ready(tmp_path):
    """Prepares a run whose held-out set has some answers."""

    def make(train=("3", "3"), held_out=("4", "4"), overrides=()):
        for name, answers in (("train", train), ("eval", held_out)):
            records = [{"question": "1 + 2 ?", "answer": each} for each in answers]
            lines = [json.dumps(record) + "\n" for record in records]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        file = tmp_path / "run.yaml"
        file.write_text(YAML.format(model=DEMO, folder=tmp_path))
        config = load(str(file), overrides)
        return config.data, prepare(config)

    return make


def worker_that_reads(data: DataDigests) -> WorkerInfo:
    return WorkerInfo(
        name="rollout-1",
        host="node-b",
        pid=7,
        devices="1 x cpu",
        address="",
        slots=8,
        data=data,
        clock_s=0.0,
    )


def test_a_worker_with_another_evaluation_file_is_refused_with_host_and_file_F4(ready):
    _, elsewhere = ready(held_out=("4", "5"))
    data, here = ready()
    here.check_worker(worker_that_reads(here.data), data)
    with pytest.raises(
        RunError,
        match=r"rollout-1 on node-b reads other answers of data.eval .*source=.*/eval.jsonl",
    ):
        here.check_worker(worker_that_reads(elsewhere.data), data)


def test_a_worker_with_other_answers_to_train_on_is_refused(ready):
    _, elsewhere = ready(train=("3", "4"))
    data, here = ready()
    with pytest.raises(RunError, match=r"other answers of data.train .*/train.jsonl"):
        here.check_worker(worker_that_reads(elsewhere.data), data)
