"""Implementations compared on recorded rollouts, and a wrong one detected.

The jobs run in this process, but in one test, which starts them as a user does.
"""

import contextlib
import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest

from benchmarks.ab import cli, compare, worker
from benchmarks.ab.job import Implementation, RunResult, StepResult, TrainingJob, WrongInput
from learner.config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from learner.durable.rollout_file import RolloutHeader, RolloutRecorder
from learner.update import head
from tests.learner.builders import random_groups
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Compiling is most of this file's time; that for one device is enough here."""
    one_device = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: one_device)
        yield


def write_rollouts(folder, model):
    """Off-policy groups (logprobs near -3 of about -5.6), so that the ratios reach both clips."""
    header = RolloutHeader(
        run_id="run",
        seed=0,
        model_path=str(model),
        model_folder=None,
        algorithm=AlgorithmConfig(entropy_coef=0.1),
        learner=LearnerConfig(
            microbatch_tokens=64,
            compute_dtype="float32",
            remat=False,
            mesh={"data": 1, "fsdp": -1},
            optimizer=OptimizerConfig(learning_rate=1e-6),
        ),
        temperature=0.8,
        valid_vocab=259,
        max_completion_tokens=16,
        total_steps=10,
    )
    path = folder / "rollouts.bin"
    recorder = RolloutRecorder(path, header)
    for version in range(STEPS):
        recorder.append(version, random_groups(2, size=2, seed=version))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny",
        num_layers=1,
        hidden_size=16,
        intermediate_size=16,
    )


@pytest.fixture(scope="module")
def rollouts(model, tmp_path_factory):
    return write_rollouts(tmp_path_factory.mktemp("rollouts"), model)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Does a job in this process; what the definition comes to in float32 is kept for the next."""
    kept = tmp_path_factory.mktemp("kept")
    known = {}

    def one(job):
        key = (job.rollouts, job.steps, job.snapshot_steps)
        is_definition = job.implementation.name == "logits:reference"
        if not is_definition or job.learner["compute_dtype"] != "float32":
            return worker.train(job)
        if key not in known:
            folder = kept / str(len(known))
            whole = dataclasses.replace(job, snapshot_folder=str(folder), snapshot_start=True)
            known[key] = worker.train(whole), folder
        result, folder = known[key]
        shutil.copytree(folder, job.snapshot_folder)
        return result

    return one


@pytest.fixture
def compared(rollouts, launch, capsys):
    """Asks for a comparison; returns the exit code and what was printed."""

    def ask(*arguments, file=rollouts, launch=launch):
        code = cli.main(["--rollouts", str(file), *arguments], launch)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return ask


FAST = ("--impl", "logits:reference,fast:xla", "--check-every", "2")


def test_right_implementations_agree_step_by_step(compared, tmp_path):
    out = tmp_path / "ab.json"
    code, printed = compared(
        *("--impl", "logits:reference,fast:xla,lean:xla"),
        *("--check-every", "2", "--json", str(out)),
    )
    assert code == 0 and "fast:xla, lean:xla agree with logits:reference" in printed
    report = json.loads(out.read_text())
    first = report["implementations"][0]["runs"][0]
    assert [step["step"] for step in first["steps"]] == [1, 2, 3]
    assert all(step["valid_tokens"] > 0 and step["update_s"] > 0 for step in first["steps"])
    assert first["steps"][0]["compile_s"] > 0 == first["steps"][2]["compile_s"]
    assert first["peak_bytes"] > 0 and first["accumulate_peak_bytes"] > 0
    for difference in report["differences"]:
        assert [change["step"] for change in difference["params"]] == [2, 3]
        # At a learning rate of 1e-6 equal parameters say nothing; equal updates do.
        change = difference["params"][-1]
        assert 0 < change["params_relative"] < 1e-6 and change["update_relative"] < 1e-3
        assert change["update_norm"] > 0


def test_implementations_take_turns_for_timing(compared, monkeypatch):
    order = []
    monkeypatch.setattr(cli, "_against", lambda first, job, launch: fake_comparison(launch(job)))

    def launch(job):
        order.append(job.implementation.lm_head)
        return fake_run(job.implementation.name)

    code, printed = compared("--impl", "logits:xla,fast", "--repeat", "3", launch=launch)
    assert code == 0 and "3 runs" in printed
    assert order == ["logits", "fast", "fast", "logits", "logits", "fast"]


def fake_run(name, *, losses=(0.5,), grad_norms=(2.0,)):
    steps = [
        StepResult(
            step=n,
            loss=loss,
            grad_norm=norm,
            skipped=False,
            valid_tokens=4,
            update_s=1.0,
            compile_s=0,
        )
        for n, (loss, norm) in enumerate(zip(losses, grad_norms, strict=True), 1)
    ]
    return RunResult(
        implementation=name,
        resolved="xla",
        platform="cpu",
        device="1 x cpu",
        versions={},
        steps=tuple(steps),
        peak_bytes=1,
        peak_of="process",
        accumulate_temp_bytes=None,
        accumulate_peak_bytes=None,
    )


def fake_comparison(run, update_relative=0.0):
    change = compare.ParameterChange(1, 1.0, 1.0, 0.0, 0.0, update_relative)
    return compare.Comparison(run=run, changes=(change,))


def test_a_wrong_temperature_is_a_disagreement(compared, monkeypatch):
    right = head.PolicyHead._options.fget
    wrong = property(lambda self: dataclasses.replace(right(self), temperature=0.81))
    monkeypatch.setattr(head.PolicyHead, "_options", wrong)
    code, printed = compared(*FAST)
    assert code == 1 and "DISAGREE at step 1 in loss: fast:xla " in printed


def test_a_lost_gradient_of_the_entropy_is_a_disagreement(compared, monkeypatch):
    """The loss of the first step is right, so only gradient and update differ."""
    right = head.schedule.value_and_gradients

    def wrong(hidden, head_VD, ids, active, data, objective, *rest, **options):
        lost = lambda logprob, entropy, data: objective(
            logprob, jax.lax.stop_gradient(entropy), data
        )
        return right(hidden, head_VD, ids, active, data, lost, *rest, **options)

    monkeypatch.setattr(head.schedule, "value_and_gradients", wrong)
    code, printed = compared(*FAST)
    assert code == 1 and "in grad_norm: fast:xla " in printed and "in loss" not in printed


def test_bfloat16_is_judged_by_its_own_noise(compared):
    code, printed = compared(*FAST, "--compute-dtype", "bfloat16")
    assert code == 0 and "1st, float32" in printed


def test_a_tolerance_of_zero_is_taken_as_zero(compared, monkeypatch):
    monkeypatch.setattr(
        cli, "_against", lambda first, job, launch: fake_comparison(launch(job), 1e-9)
    )
    launch = lambda job: fake_run(job.implementation.name)
    assert compared(*FAST, launch=launch)[0] == 0
    code, printed = compared(*FAST, "--update-tol", "0", launch=launch)
    assert code == 1 and "in update norm" in printed and "tolerance 0.00e+00" in printed


def test_the_noise_of_the_first_run_sets_the_tolerances():
    first = fake_run("a", losses=(0.5, 0.5), grad_norms=(2.0, 1.0))
    exact = fake_comparison(fake_run("a", losses=(0.5, 0.6), grad_norms=(2.0, 1.0)), 0.1)
    tolerances = compare.measured_tolerances(first, exact)
    # 0.1 of 1 and 0.1 of the update, twice; no noise of the gradient norm: one rounding.
    np.testing.assert_allclose(tolerances, (0.2, 2**-8, 0.2))


def test_a_number_that_only_one_has_is_a_disagreement():
    run = compare.Comparison(run=fake_run("b", losses=(None,)), changes=())
    (found,) = compare.disagreements(fake_run("a"), [run], compare.EXACT)
    assert found.quantity == "loss" and found.difference is None
    both = compare.disagreements(fake_run("a", losses=(None,)), [run], compare.EXACT)
    assert both == []


def test_parameters_are_compared_by_hand_worked_numbers(tmp_path):
    for name, values in {"start": [0, 0, 2], "a": [3, 4, 2], "b": [3, 4, 14]}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "w.npy", np.array(values, np.float32))
    change = compare.compare_snapshots(*(tmp_path / n for n in ("start", "a", "b")), step=1)
    # The updates (3, 4, 0) and (3, 4, 12) have norms 5 and 13 and differ by 12.
    np.testing.assert_allclose(change, (1, 5, 13, 12, 12 / 29**0.5, 12 / 13))


def test_updates_that_move_nothing_prove_nothing(compared, monkeypatch):
    still = compare.ParameterChange(3, 0.0, 0.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(
        cli,
        "_against",
        lambda first, job, launch: compare.Comparison(run=launch(job), changes=(still,)),
    )
    code, printed = compared(*FAST, launch=lambda job: fake_run(job.implementation.name))
    assert code == 2 and "after step 3 no parameter has moved" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--impl", "fast"], "names 1 implementation"),
        (["--impl", "fast,slow:xla"], "'slow:xla': write HEAD:IMPL, a head of logits, fast, lean"),
        (["--impl", "fast,fast:triton"], "implementation of auto, reference, xla, pallas$"),
        (["--impl", "fast,xla:lean"], r"'xla:lean': did you mean lean:xla\?"),
        (["--impl", "lean,fast:reference"], "the reference has whole logits"),
        (["--impl", "fast,lean", "--steps", "0"], "--steps 0: .* has steps 1 to 3"),
        (["--impl", "fast,lean", "--steps", "4"], "--steps 4: .* has steps 1 to 3"),
        (["--impl", "fast,lean", "--check-every", "0"], "--check-every 0: must be at least 1"),
        (["--impl", "fast,lean", "--loss-tol", "nan"], "--loss-tol nan: must be 0 or above"),
        (["--impl", "fast,lean", "--compute-dtype", "f8"], "'f8': must be bfloat16 or float32"),
        (["--impl", "fast,lean", "--mesh", "2"], "--mesh '2': give two whole numbers"),
        (["--impl", "fast,lean", "--mesh", "a"], "--mesh 'a': give two whole numbers, DATA,FSDP"),
        (["--impl", "fast,lean", "--mesh", "0,1"], "--mesh 0,1: .*must be positive"),
        (["--impl", "fast,lean", "--mesh", "3,3"], "fast:auto with model .*3"),
        (["--impl", "fast,lean", "--model", "nowhere"], "'nowhere' does not exist"),
        (["--impl", "fast,lean", "--json", "no/such/x.json"], "its folder does not exist"),
        (["--impl", "fast,lean", "--json", "."], "--json '.' is a folder: name a file in it"),
    ],
)
def test_a_wrong_argument_is_one_message(compared, arguments, message):
    code, printed = compared(*arguments)
    assert code == 2
    assert printed.startswith("error: ") and re.search(message, printed)


@pytest.mark.parametrize(
    "optimizer, steps, refused",
    [
        ({"warmup_steps": 5}, 1, "--steps 1: .* take at least 2 steps"),
        ({"warmup_steps": 5}, 2, None),
        ({"warmup_steps": 0}, 1, None),
        ({"learning_rate": 0.0}, 3, "learning rate is 0"),
    ],
)
def test_updates_known_to_move_nothing_are_refused_before_training(optimizer, steps, refused):
    learner = LearnerConfig(optimizer=OptimizerConfig(**optimizer))
    with pytest.raises(WrongInput, match=refused) if refused else contextlib.nullcontext():
        cli._check_rate(learner, steps)


def test_the_costs_say_that_pallas_is_interpreted(compared, monkeypatch):
    monkeypatch.setattr(cli, "_against", lambda first, job, launch: fake_comparison(launch(job)))

    def launch(job):
        resolved = {"xla": "xla", "pallas": "pallas_interpret"}[job.implementation.loss_impl]
        return dataclasses.replace(fake_run(job.implementation.name), resolved=resolved)

    assert "interpreted" in compared("--impl", "fast:xla,fast:pallas", launch=launch)[1]
    assert "interpreted" not in compared("--impl", "fast:xla,lean:xla", launch=launch)[1]


def test_a_file_that_cannot_be_used_is_one_message(compared, rollouts, tmp_path):
    impl = ("--impl", "fast,lean")
    code, printed = compared(*impl, file=tmp_path / "absent.bin")
    assert code == 2 and "No such file" in printed and "log.record_rollouts=true" in printed
    whole, bad = rollouts.read_bytes(), tmp_path / "bad.bin"
    bad.write_bytes(whole[:-1] + b"\0")
    code, printed = compared(*impl, file=bad)
    assert code == 2 and "record 3 " in printed
    bad.write_bytes(whole[:200])
    code, printed = compared(*impl, file=bad)
    assert code == 2 and "has no complete step" in printed


def test_an_implementation_that_the_platform_lacks_is_refused_at_once(model, rollouts, monkeypatch):
    monkeypatch.setattr(worker.jax, "devices", lambda: [type("D", (), {"platform": "gpu"})])
    xla, pallas = (Implementation(lm_head="fast", loss_impl=i) for i in ("xla", "pallas"))
    job = TrainingJob(
        rollouts=str(rollouts),
        model=str(model),
        implementation=xla,
        others=(xla, pallas),
        learner={},
        steps=1,
        snapshot_steps=(),
        snapshot_folder=None,
        snapshot_start=False,
        exact=False,
    )
    with pytest.raises(WrongInput, match="no Pallas kernel for platform 'gpu'"):
        worker.train(job)


@pytest.mark.slow
def test_processes_of_their_own_and_a_cut_record(rollouts, tmp_path, capfd):
    cut = tmp_path / "cut.bin"
    cut.write_bytes(rollouts.read_bytes()[:-9])
    code = cli.main(["--rollouts", str(cut), "--impl", "logits:xla,lean"])
    printed = capfd.readouterr()
    assert code == 0 and "lean:auto agrees with logits:xla" in printed.out
    assert "cut short after step 2" in printed.err and "2 recorded steps" in printed.out
