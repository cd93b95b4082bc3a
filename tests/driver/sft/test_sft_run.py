"""Supervised training as a user sees it: it learns, goes on exactly, exports, and says why not."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from diagnosis.catalog.catalog import find
from driver.accounting.jsonl import read_lines
from driver.config.load_config import ConfigError, load_as
from driver.errors import NothingTrained
from driver.sft import cli
from driver.sft.sft_config import SftConfig
from driver.sft.sft_plan import plan_training
from driver.sft.sft_run import NoDevices, SftTraining
from driver.signals import Interrupted, StopSignal
from models.files.checkpoint import load_model
from models.load_tokenizer import load_tokenizer
from models.platform import require_platform
from services.process import failpoints
from tests.deadlines import HANG_S
from tests.driver.reports.test_trackers import tensorboard_events
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

NAMES = ("ada", "bea", "cyd", "dot", "eve", "fay")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six questions with an answer each; the held-out ones are two of them."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"hi {name}", "completion": name.upper()} for name in NAMES]
    for file, some in (("train", rows), ("eval", rows[:2])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{file}.jsonl").write_text(text)
    return folder


@pytest.fixture
def options(model, data, tmp_path):
    """`--set` of a training of six steps."""
    return [
        f"run.output_dir={tmp_path / 'out'}",
        f"model.path={model}",
        f"data.train.source={data / 'train.jsonl'}",
        f"data.eval.source={data / 'eval.jsonl'}",
        *("run.steps=6", "batch.sequences_per_step=4", "batch.max_tokens=40", "eval.every_steps=2"),
        *("learner.microbatch_tokens=64", "learner.compute_dtype=float32", "learner.remat=false"),
        *("learner.optimizer.learning_rate=1e-2", "learner.optimizer.schedule=cosine"),
        *("checkpoint.every_steps=2", "learner.mesh.data=2"),
    ]


@pytest.fixture
def make(options, tmp_path, monkeypatch):
    """Makes a training with overrides, in a folder of its own or that of another."""

    two = lambda platform: require_platform(platform)[:2]  # more only take turns on the cores
    monkeypatch.setattr("driver.sft.sft_run.require_platform", two)

    def build(*overrides, folder="out"):
        config = load_as(SftConfig, None, [*options, *overrides])
        (tmp_path / folder).mkdir(exist_ok=True)
        # The plan counts the devices of a process of its own, which would have one.
        one = config.model_copy(
            update={"learner": config.learner.model_copy(update={"mesh": MESH})}
        )
        return SftTraining(config, tmp_path / folder, plan_training(one))

    return build


MESH = load_as(SftConfig, None, ["model.path=m", "data.train.source=a.jsonl"]).learner.mesh


def arrays(training):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(training._learner.state)]


def test_it_learns_the_answers_and_exports_a_model_that_says_them(make, tmp_path, capsys):
    training = make("run.steps=160", "eval.every_steps=40", "checkpoint.every_steps=80")
    training.train(StopSignal())
    training.export()
    training.check_trained()
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(161))
    assert lines[-1]["train/loss"] < 0.1 < lines[1]["train/loss"]
    assert lines[0].keys() == {"step", "time", "eval/loss"}
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 40, 80, 120, 160]
    assert lines[-1]["eval/loss"] < 0.1
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("step   1/160  loss 5.") and "tokens/s" in printed[1]
    assert "held-out loss" in printed[40] and "model.path=" in printed[-1]

    exported = load_model(str(tmp_path / "out" / "export"))
    tokenizer = load_tokenizer(str(tmp_path / "out" / "export"))
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export", dtype=torch.float32)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi eve"}])
    said = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
    assert tokenizer.decode_completion(said[0, len(prompt) :].tolist()) == "EVE"
    assert exported.config == load_model(str(make("run.steps=1")._config.model.path)).config


def test_a_training_that_was_cut_twice_ends_with_the_same_bits(make, tmp_path):
    whole = make(folder="whole")
    whole.train(StopSignal())

    class Cut(Exception):
        pass

    def cut_after(step):
        training = make(folder="cut")
        if step > 3:
            training.restore()
        update = training._learner.update

        def counted(sequences):
            if training._step == step:
                raise Cut
            return update(sequences)

        training._learner.update = counted
        with pytest.raises(Cut):
            training.train(StopSignal())
        training.close()

    cut_after(3)  # one step after the checkpoint of step 2
    cut_after(5)
    last = make(folder="cut")
    last.restore()
    assert last._step == 4
    last.train(StopSignal())
    for one, other in zip(arrays(whole), arrays(last), strict=True):
        np.testing.assert_array_equal(one, other)
    logged = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    strip = lambda line: {k: v for k, v in line.items() if k != "time" and "throughput" not in k}
    assert list(map(strip, logged[0])) == list(map(strip, logged[1]))


def test_a_signal_ends_it_after_the_step_with_a_checkpoint(make, tmp_path):
    training, stop = make(), StopSignal()
    stop._handle(signal.SIGTERM, None)
    with pytest.raises(Interrupted) as ended:
        training.train(stop)
    assert ended.value.exit_code == 143 and training._step == 1
    assert (tmp_path / "out" / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_training_goes_on(
    make, tmp_path, capsys, beside
):
    training = make(f"checkpoint.asynchronous={beside}")
    failpoints.install(tmp_path / "points")
    failpoints.arm(tmp_path / "points", "learner.checkpoint", "enospc")
    try:
        training.train(StopSignal())
        training.close()
    finally:
        failpoints.install(None)
    said = capsys.readouterr().out
    assert said.count("the checkpoint of step 2 could not be written to") == 1
    assert "No space left on device; the training goes on" in said
    assert training._checkpoints.complete_steps() == [6, 4]


def test_a_finished_training_that_resumes_takes_no_step(make, tmp_path):
    first = make()
    first.train(StopSignal())
    again = make()
    again.restore()
    again.train(StopSignal())
    assert again._skipped == [] and len(read_lines(tmp_path / "out" / "metrics.jsonl")) == 7
    again.check_trained()
    shorter = make("run.steps=4")
    with pytest.raises(ConfigError, match="has 6 steps behind it, more than the 4 asked for"):
        shorter.restore()


def test_tensorboard_gets_what_the_log_has_and_forgets_what_a_resume_takes_again(make, tmp_path):
    first = make("run.steps=3", "log.tensorboard=true", "checkpoint.every_steps=2")
    first.train(StopSignal())
    first.close()
    logged = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert all(find(name) for line in logged for name in line if name not in ("step", "time"))
    scalars, purged = tensorboard_events(tmp_path / "out")
    for name, steps in (("train/loss", [1, 2, 3]), ("eval/loss", [0, 2, 3])):
        shown = {step: value for step, tag, value in scalars if tag == name}
        assert list(shown) == steps and purged == []
        assert shown == pytest.approx({step: logged[step][name] for step in steps})
    again = make("log.tensorboard=true")
    again.restore()
    again.close()
    assert tensorboard_events(tmp_path / "out")[1] == [4]


def test_steps_that_all_fail_are_an_error(make):
    training = make("run.steps=2")
    state = training._learner.state
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.inf), state.params)
    training._learner.state = type(state)(
        params=broken, opt_state=state.opt_state, update_count=state.update_count
    )
    training.train(StopSignal())
    with pytest.raises(NothingTrained, match="none of the 2 steps changed the model"):
        training.check_trained()


def test_a_platform_that_is_not_there_is_one_message(make):
    try:
        with pytest.raises(NoDevices, match="placement.platform=tpu"):
            make("placement.platform=tpu")
    finally:
        jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def command(options):
    """Runs `python -m learner.sft` in a process of its own; returns exit code and outputs."""

    def run(*arguments, **environ):
        given = [part for option in options for part in ("--set", option)]
        ended = subprocess.run(
            [sys.executable, "-m", "learner.sft", *given, *arguments],
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", **environ},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        return ended.returncode, ended.stdout, ended.stderr

    return run


def test_the_command_trains_resumes_and_refuses_another_training(command, tmp_path, data):
    code, out, err = command("--set", "run.steps=3", JAX_ENABLE_X64="1")
    assert code == 0, err
    assert "note: JAX_ENABLE_X64=1 of this shell does not hold" in out
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file()
    assert command()[0] == 2, "the folder is not empty"
    code, out, err = command("--resume", "--set", "learner.optimizer.learning_rate=1e-3")
    assert code == 0 and "resumed at step 3" in out, err
    assert "learner.optimizer.learning_rate: 0.01 -> 0.001" in out
    for override, what in (("run.seed=5", "run.seed"), ("data.system_prompt=Hm.", "data.train")):
        code, out, err = command("--resume", "--set", override)
        assert code == 2 and "Traceback" not in err and f"put {what}" in err


def test_a_dry_run_and_a_printed_configuration_leave_nothing_behind(options, tmp_path, capsys):
    given = [part for option in options for part in ("--set", option)]
    assert cli.main([*given, "--set", "learner.mesh.data=1", "--dry-run"]) == 0
    assert "6 steps of 4 records" in capsys.readouterr().out
    assert cli.main([*given, "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_as(SftConfig, str(file)).run.steps == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--set", "run.stepps=3"], "did you mean run.steps?"),
        (["--config", "/none.yaml"], "cannot read the configuration file /none.yaml"),
        (["--set", "data.train.answer_field=x"], "has no field 'x'"),
        (["--set", "data.train.source=/none.jsonl"], "/none.jsonl does not exist"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(options, capsys, arguments, message):
    options = [*options, "learner.mesh.data=1"]  # this process is to have one device
    given = [part for option in options for part in ("--set", option)]
    assert cli.main([*given, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and "Traceback" not in err
