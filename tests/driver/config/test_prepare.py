"""What every run checks before it starts, and of every worker that joins."""

import json
import pathlib
import time

import pytest

from driver.config.load_config import ConfigError, load
from driver.config.prepare import prepare
from driver.errors import RunError
from rollout_worker.data.data_digests import DataDigests
from rollout_worker.worker_records import WorkerInfo
from tests.deadlines import HANG_S
from tests.tiny_model import write_tiny_model

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


def refusal(ready, **keys) -> str:
    with pytest.raises(ConfigError) as refused:
        ready(**keys)
    return str(refused.value)


WORDS = ("x + 3", "(2, 5)", "\\sqrt{7}", "B")


def test_gold_answers_that_no_completion_could_equal_are_refused_N07(ready):
    said = refusal(ready, train=WORDS)
    for part in (
        "data.train: gsm8k_answer cannot judge 4 of 4 gold answers",
        "train.jsonl",
        "line 1, answer 'x + 3': the gold answer 'x + 3' is not a number",
        "use math_verify or your own scorer",
        "line 3",
        "and 1 more. Choose another scorer, or correct answer_field or file",
    ):
        assert part in said, part


def test_a_held_out_set_that_cannot_be_judged_is_refused(ready):
    assert "data.eval: gsm8k_answer cannot judge 2 of 2" in refusal(ready, held_out=WORDS[:2])


def test_gold_answers_are_judged_source_by_source(ready, tmp_path):
    """A source of which nothing can be judged is refused, though the others can be."""
    lines = [json.dumps({"question": "1 + 2 ?", "answer": each}) + "\n" for each in WORDS[:2]]
    (tmp_path / "words.jsonl").write_text("".join(lines))
    both = [{"source": str(tmp_path / name)} for name in ("train.jsonl", "words.jsonl")]
    overrides = [f"data.train={json.dumps(both)}"]
    said = refusal(ready, overrides=overrides)
    assert "data.train.1 (words): gsm8k_answer cannot judge 2 of 2" in said
    assert "words.jsonl, so that" in said and "line 1, answer 'x + 3'" in said
    (tmp_path / "words.jsonl").write_text("".join([*lines, lines[0].replace("x + 3", "3")]))
    _, prepared = ready(overrides=overrides)
    assert "data.train.1 (words): gsm8k_answer cannot judge 2 of 3 gold answers" in prepared.text


def test_a_worker_with_another_file_of_several_is_refused_with_that_file(ready, tmp_path):
    (tmp_path / "more.jsonl").write_text(json.dumps({"question": "5 ?", "answer": "5"}) + "\n")
    both = [{"source": str(tmp_path / name)} for name in ("train.jsonl", "more.jsonl")]
    overrides = [f"data.train={json.dumps(both)}"]
    _, elsewhere = ready(overrides=overrides)
    (tmp_path / "more.jsonl").write_text(json.dumps({"question": "5 ?", "answer": "6"}) + "\n")
    data, here = ready(overrides=overrides)
    with pytest.raises(
        RunError, match=r"answers of data.train.1 .*\(data.train.1.source=\S*/more.jsonl\)"
    ):
        here.check_worker(worker_that_reads(elsewhere.data), data)


def rows_of(tmp_path, *records):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return [f"data.train={{source: {tmp_path / 'rows.jsonl'}}}"]


def test_a_record_without_an_answer_is_refused_where_a_scorer_needs_one(ready, tmp_path):
    rows = rows_of(
        tmp_path,
        {"prompt": "1 + 2 ?", "solution": "3"},
        {"prompt": "1 + 3 ?", "solution": None, "level": 2},
        {"prompt": "1 + 4 ?", "answer": ""},
    )
    said = refusal(ready, overrides=rows)
    for part in (
        "data.train: gsm8k_answer needs an answer, but 2 of 3 records of",
        "rows.jsonl have none, the first in line 2 with the fields ['level', 'prompt', 'solution']",
        "set the source's answer_field, add the answers, or choose scorers that need none",
    ):
        assert part in said, part
    math = [*rows, "reward.functions=[{name: format}, {name: math_verify}]"]
    assert "math_verify needs an answer" in refusal(ready, overrides=math)
    _, prepared = ready(overrides=[*rows, "reward.functions=[{name: format}]"])
    assert prepared.order.count == 3


def test_held_out_records_without_an_answer_are_refused(ready, tmp_path):
    rows = rows_of(tmp_path, {"prompt": "1 + 2 ?"})
    said = refusal(ready, overrides=[rows[0].replace("train", "eval")])
    assert "data.eval: gsm8k_answer needs an answer, but 1 of 1 records" in said


def test_what_does_not_apply_to_messages_is_noted(ready, tmp_path):
    user = {"role": "user", "content": "1 + 2 ?"}
    own = {"prompt": [{"role": "system", "content": "Be brief."}, user], "answer": "3"}
    rows = rows_of(tmp_path, own, {"prompt": [user], "answer": "3"}, {"prompt": "?", "answer": "3"})
    _, prepared = ready(overrides=rows)
    assert "system message" not in prepared.text and "question_template" not in prepared.text
    asked = [*rows, "data.system_prompt=Be right.", "data.question_template={question} Now."]
    text = ready(overrides=asked)[1].text
    assert (
        "note: data.train: 1 of 3 prompts have a system message of their own, which takes" in text
    )
    assert "note: data.train: 2 of 3 prompts are messages, to which data.question_template" in text


def test_a_part_that_cannot_be_judged_is_noted(ready):
    _, prepared = ready(train=("3", "B", "3"))
    assert (
        "note: data.train: gsm8k_answer cannot judge 1 of 3 gold answers of" in prepared.text
        and "line 2, answer 'B': the gold answer 'B' is not a number" in prepared.text
    )
    _, prepared = ready()
    assert "cannot judge" not in prepared.text


def test_a_task_without_a_single_answer_needs_its_own_scorer_N06(ready):
    task = ("data.train={source: 'reasoning_gym:rush_hour', size: 2}", "data.eval=null")
    long = (*task, "rollout.max_prompt_tokens=500", "rollout.max_completion_tokens=12")
    said = refusal(ready, overrides=long)
    assert "gsm8k_answer cannot judge 2 of 2" in said and "item 0, answer ''" in said
    own = "reward.functions=[{name: reasoning_gym}]"
    assert "2 prompts from reasoning_gym:rush_hour" in ready(overrides=(*long, own))[1].text


@pytest.mark.parametrize(
    "code, problem",
    [
        (
            "def loss(*, ratio, advantage, **_): return -(ratio * advantage).sum()",
            "not a float32 each",
        ),
        (
            "def loss(*, ratio, advantage, **_):\n    if (ratio > 1).all(): pass",
            "it raises TracerBoolConversionError: Attempted boolean conversion",
        ),
        (
            "def loss(**_): raise ValueError('beta is missing\\nuse it')",
            "it raises ValueError: beta is missing use it: correct the function",
        ),
        ("import time; time.sleep(3600)", "it took over 1 s"),
        (
            "def loss(**_):\n    while True: print('y' * 2**16)",
            "it prints without end, over 16,777,216 bytes",
        ),
        (
            "import os\nwhile True: os.write(2, b'y' * 2**16)",
            "it prints without end, over 16,777,216 bytes",
        ),
        ("import os; os._exit(7)", "ended with 7: correct the function"),
        ("import os; os._exit(0)", "ended with 0: correct the function"),
        ("import os\ndef loss(**_): os._exit(0)", "ended with 0: correct the function"),
    ],
)
def test_a_policy_loss_that_cannot_be_used_ends_the_start(
    ready, tmp_path, monkeypatch, code, problem
):
    (tmp_path / "tried_losses.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "sleep" in code:
        monkeypatch.setattr("driver.config.checks.policy_loss_trial._POLICY_LOSS_S", 1.0)
    with pytest.raises(ConfigError, match=f"algorithm.policy_loss=tried_losses:loss: .*{problem}"):
        ready(overrides=["algorithm.policy_loss=tried_losses:loss"])


def test_a_policy_loss_of_ones_own_is_tried_and_named(ready, tmp_path, monkeypatch):
    (tmp_path / "good_losses.py").write_text("def loss(*, ratio, advantage, **_): return -ratio\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, prepared = ready(overrides=["algorithm.policy_loss=good_losses:loss"])
    assert "loss: good_losses:loss of token ratios" in prepared.text


def test_what_a_policy_loss_leaves_behind_is_not_waited_for_and_ends(ready, tmp_path, monkeypatch):
    (tmp_path / "leaving_losses.py").write_text(
        "import subprocess, pathlib\n"
        "left = subprocess.Popen(['sleep', '3600'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(left.pid))\n"
        "def loss(*, ratio, advantage, **_): return -ratio\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ready(overrides=["algorithm.policy_loss=leaving_losses:loss"])
    left = pathlib.Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + HANG_S
    while left.exists() and left.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline


def scorer_of(tmp_path, monkeypatch, body: str, parameter="completion") -> str:
    """The override for a scorer with this body."""
    lines = f"def score({parameter}, *, answer, prompt, item):\n    {body}\n"
    (tmp_path / "tried_scorer.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    return 'reward.functions=[{name: "tried_scorer:score"}]'


@pytest.mark.slow
@pytest.mark.parametrize(
    "body, parameter, problem",
    [
        ("return '1.0'", "completion", "must be a number, got str '1.0': return float(...) of it"),
        ("return None", "completion", "must be a number, got NoneType"),
        ("return {'reward': 1.0}", "completion", "needs the key 'value', got ['reward']"),
        ("return float('nan' if completion != answer else 1)", "completion", "finite, got nan"),
        ("return [1.0]", "completions", "one reward for each of the 2 completions"),
        ("return 1.0", "completions", "one reward for each of the 2 completions"),
    ],
)
def test_a_scorer_whose_result_is_no_reward_is_refused_at_the_start(
    ready, tmp_path, monkeypatch, body, parameter, problem
):
    text = refusal(ready, overrides=[scorer_of(tmp_path, monkeypatch, body, parameter)])
    assert text.startswith("tried_scorer:score, tried on data.train, line 1: ")
    assert problem in text


@pytest.mark.slow
def test_a_scorer_that_fails_for_every_completion_is_noted_and_one_that_works_is_not(
    ready, tmp_path, monkeypatch
):
    fails = scorer_of(tmp_path, monkeypatch, "raise RuntimeError('no server')")
    _, noted = ready(overrides=[fails])
    assert "note: tried_scorer:score, tried on data.train, line 1: it failed for" in noted.text
    assert "RuntimeError: no server" in noted.text
    works = scorer_of(tmp_path, monkeypatch, "return float(int(completion) == int(answer))")
    _, fine = ready(overrides=[works])
    assert "tried on" not in fine.text, "an answer is scored; what is none may fail"


def test_a_curriculum_that_cannot_skip_anything_is_noted(ready):
    curriculum = "data.curriculum={skip_after: 2}"
    short = ["rollout.prompts_per_step=1", "run.steps=4", curriculum]
    long = ["rollout.prompts_per_step=1", "run.steps=5", curriculum]
    assert "the run has 2.00 epochs at most" in ready(overrides=short)[1].text
    assert "skips nothing" not in ready(overrides=long)[1].text


def test_prompts_of_several_training_sources_are_noted(ready, tmp_path):
    for name, numbers in (("one", range(4)), ("other", range(3, 6)), ("third", range(9, 11))):
        rows = [{"question": f"1 + {n}?", "answer": "3"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = ", ".join(
        f"{{source: {tmp_path}/{name}.jsonl}}" for name in ("one", "other", "third")
    )
    _, prepared = ready(overrides=[f"data.train=[{sources}]"])
    assert (
        "note: data.train.1 (other): 1 of 3 prompts have a question of data.train.0 (one), and are "
        "drawn by the weights of both sources" in prepared.text
    )
    assert "third): " not in "".join(line for line in prepared.text.splitlines() if "note" in line)

    halves = ", ".join(
        f"{{source: {tmp_path}/one.jsonl, {part}}}"
        for part in ("size: 2, name: a", "skip: 2, name: b", "skip: 1, name: c")
    )
    _, prepared = ready(overrides=[f"data.train=[{halves}]"])
    assert "note: data.train.1 (b)" not in prepared.text
    assert "note: data.train.2 (c): 1 of 3 prompts have a question of data.train.0 (a)" in (
        prepared.text
    )
    assert "note: data.train.2 (c): 2 of 3 prompts have a question of data.train.1 (b)" in (
        prepared.text
    )


def test_a_variable_for_scorers_that_is_not_set_is_noted(ready, monkeypatch):
    monkeypatch.setenv("SET_KEY", "value")
    monkeypatch.delenv("UNSET_KEY", raising=False)
    _, prepared = ready(overrides=["reward.environment=[SET_KEY, UNSET_KEY]"])
    assert "note: reward.environment names UNSET_KEY, not set here" in prepared.text


def several(folder, *more):
    """An override: the file of the held-out set as two sets, the second with more keys."""
    second = ", ".join([f"name: second, source: {folder}/eval.jsonl", *more])
    return f"data.eval=[{{source: {folder}/eval.jsonl}}, {{{second}}}]"


def test_several_held_out_sets_are_counted_and_described_each(ready, tmp_path):
    override = several(tmp_path, "scorer: exact, samples_per_prompt: 4, temperature: 1")
    _, prepared = ready(overrides=[override])
    assert prepared.held_out == (2, 2)
    assert "data.eval.0 (eval): 2 prompts from" in prepared.text
    assert "2 evaluated by exact, 4 completions of each at temperature 1" in prepared.text
    assert len(prepared.data.eval_prompts.split()) == 2


def test_a_held_out_set_is_judged_by_its_own_scorer_only(ready, tmp_path):
    words = ("red", "blue")
    override = several(tmp_path, "scorer: exact")
    refused = refusal(ready, held_out=words, overrides=[override])
    assert "data.eval.0 (eval): gsm8k_answer cannot judge 2 of 2" in refused
    only = f"data.eval=[{{source: {tmp_path}/eval.jsonl, scorer: exact}}]"
    _, prepared = ready(held_out=words, overrides=[only])
    assert "cannot judge" not in prepared.text


@pytest.mark.parametrize(
    "more, problem",
    [
        ("scorer: exakt", "data.eval.1 (second): scorer: "),
        ("scorer: exact, scorer_params: {colour: red}", "data.eval.1 (second): scorer: "),
        ("source: none.jsonl", "data.eval.1 (second): data file none.jsonl does not exist"),
        ("pass_k: [1, 2]", "data.eval.1 (second): eval.pass_k=[1, 2] must lie between 1 and"),
        ("scorer_params: {a: 1}", "need scorer, the name of the function that gets them"),
    ],
)
def test_what_is_wrong_with_one_of_several_sets_names_it(ready, tmp_path, more, problem):
    override = several(tmp_path, more)
    if more.startswith("source"):
        override = override.replace(f"name: second, source: {tmp_path}/eval.jsonl", "name: second")
    assert problem in refusal(ready, overrides=[override])


@pytest.mark.parametrize(
    "name, problem",
    [("eval", "both called 'eval'"), ("reward", "names metrics of eval/ already")],
)
def test_a_held_out_set_needs_a_name_of_its_own(ready, tmp_path, name, problem):
    override = several(tmp_path).replace("second", name)
    assert problem in refusal(ready, overrides=[override])


def test_no_held_out_set_is_null_and_no_empty_list(ready):
    assert "eval=[] has no set" in refusal(ready, overrides=["data.eval=[]"])


def test_a_teacher_with_another_vocabulary_ends_the_start(ready, tmp_path):
    teacher = write_tiny_model(tmp_path / "teacher")
    said = refusal(ready, overrides=[f"algorithm.distillation.teacher={teacher}"])
    for part in (
        f"algorithm.distillation.teacher: {teacher} has another vocabulary than {DEMO}",
        "of 369 tokens differ",
        "choose a teacher with the model's tokenizer",
    ):
        assert part in said, part
    missing = refusal(ready, overrides=["algorithm.distillation.teacher=/no/where"])
    assert "algorithm.distillation.teacher: model path '/no/where' does not exist" in missing


def test_a_teacher_is_named_in_the_plan_with_its_form(ready):
    overrides = [f"algorithm.distillation={{teacher: {DEMO}, form: top_k, top_k: 8}}"]
    _, prepared = ready(overrides=overrides)
    assert f"; distillation 1 x top 8 from {DEMO}, advantages x 0" in prepared.text
    assert prepared.teacher is not None and len(prepared.teacher.digest) == 64


CODE = "[{name: code_tests, params: {sandbox: best_effort, total_s: 3}}]"


def test_what_protects_the_host_from_code_is_noted(ready):
    answers = ("assert f(1) == 2", "assert f(2) == 3")
    keys = {"train": answers, "held_out": answers}
    _, prepared = ready(**keys, overrides=[f"reward.functions={CODE}"])
    assert "note: code_tests runs the code of completions with " in prepared.text
    said = refusal(ready, **keys, overrides=[f"reward.functions={CODE}", "reward.timeout_s=3.2"])
    assert "total_s=3 s, but reward.timeout_s=3.2 ends it" in said
    assert "set timeout_s to at least 3.5" in said


def test_rows_whose_tests_cannot_run_are_named(ready):
    rows = ("assert f(1) == 2", "assert f(1) ==")
    overrides = [f"reward.functions={CODE}"]
    _, prepared = ready(train=rows, held_out=rows[:1], overrides=overrides)
    assert "data.train: code_tests cannot judge 1 of 2 gold answers" in prepared.text
    assert "line 2, answer 'assert f(1) ==': the answer is no Python" in prepared.text


def test_a_prompt_is_placed_in_its_source_and_one_that_is_left_out_says_why_and_where(
    ready, tmp_path
):
    long = {"question": "1 + 2 ? " * 40, "answer": "3"}
    more = tmp_path / "more.jsonl"
    rows = [{"question": "2 + 2 ?", "answer": "4"}, long, {"question": "3 + 2 ?", "answer": "5"}]
    more.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = f"data.train=[{{source: {tmp_path}/train.jsonl}}, {{source: {more}}}]"
    _, prepared = ready(overrides=[both])
    assert prepared.order.count == 4
    assert [prepared.place_of(place) for place in range(4)] == [
        f"data.train.0 (train): {tmp_path}/train.jsonl, line 1",
        f"data.train.0 (train): {tmp_path}/train.jsonl, line 2",
        f"data.train.1 (more): {more}, line 1",
        f"data.train.1 (more): {more}, line 3",
    ]
    [left_out] = prepared.left_out
    assert left_out["where"] == f"data.train.1 (more): {more}, line 2"
    assert left_out["why"].endswith("tokens, more than rollout.max_prompt_tokens=64")
    assert "1 left out with more than 64 tokens (line 2 with " in prepared.text
