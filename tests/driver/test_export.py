"""A policy exported from the checkpoints of a run, whatever became of the run."""

import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from driver import export
from driver.accounting.accuracy import Accuracy
from driver.accounting.evaluations import Evaluations
from driver.config.yaml_text import dump_yaml
from learner.config import LearnerConfig, LoraConfig, OptimizerConfig
from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_manifest import verify_checkpoint
from learner.recorded_learner import RecordedLearner
from models.files.checkpoint import load_model
from services.process.phase_clock import PhaseClock
from services.wire.tls import RunAuthority
from tests.driver.hub_server import TOKEN, HubServer
from tests.learner.tiny_learner import RUN_STATE, learner_spec, train
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of 2, 3 and 4, the first of which is kept as the best; the exports of 2 and 4;
    and in `plain` checkpoints without a driver's state, as supervised training has them.
    """
    folder = tmp_path_factory.mktemp("run")
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    spec = learner_spec(model, RunAuthority.create("run"), folder)
    learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
    learner.publish()
    evaluations = Evaluations()
    for step, right in enumerate((1, 9, 5, 8), 1):
        train(learner, step)
        evaluations.add("", step, Accuracy(correct=right, total=10), None)
        state = RUN_STATE | {"evaluations": evaluations.state()}
        learner.save(step, state, evaluations.scores())
        if step == 2:
            learner.export(str(folder / "export-2"))
    learner.export(str(folder / "export"))
    plain = CheckpointFolder(folder / "plain" / "checkpoints", keep=3)
    for step in (5, 6, 7):
        plain.save(step, learner._core.state, {})
    learner.close()
    (folder / "config.yaml").write_text(dump_yaml({"model": {"path": str(model)}}))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_newest_checkpoint_gives_the_folder_that_the_end_of_the_run_gave(run, capsys):
    before = {path for path in run.rglob("*") if path.is_file()}
    assert export.main(["--run", str(run)]) == 0
    assert files_of(run / "export-step-4") == files_of(run / "export")
    said = capsys.readouterr().out
    assert said == f"exported step 4 in float32: {run}/export-step-4\n"
    after = {path for path in run.rglob("*") if path.is_file()}
    assert after - before == set((run / "export-step-4").iterdir()) and before <= after


def test_the_best_checkpoint_is_kept_though_newer_ones_are_and_can_be_exported(run, tmp_path):
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["best", "step-00000003", "step-00000004"]
    assert [path.name for path in (run / "checkpoints/best").iterdir()] == ["step-00000002"]
    assert export.main(["--run", str(run), "--best", "--output", str(tmp_path / "best")]) == 0
    assert files_of(tmp_path / "best") == files_of(run / "export-2")


def test_the_type_of_the_tensors_can_be_chosen(run, tmp_path):
    asked = ["--run", str(run), "--step", "3", "--dtype", "bfloat16"]
    assert export.main([*asked, "--output", str(tmp_path / "out")]) == 0
    loaded = load_model(str(tmp_path / "out"))
    assert set(loaded.stored_dtypes.values()) == {np.dtype(ml_dtypes.bfloat16)}


def test_a_newest_checkpoint_that_is_cut_is_passed_over_unless_it_is_asked_for(run, capsys):
    cut = next(path for path in (run / "checkpoints/step-00000004/state").rglob("*") if _big(path))
    cut.write_bytes(cut.read_bytes()[:-1])
    assert export.main(["--run", str(run)]) == 0
    assert "exported step 3" in capsys.readouterr().out
    assert export.main(["--run", str(run), "--step", "4"]) == 2
    assert "step-00000004" in capsys.readouterr().err


def _big(path):
    return path.is_file() and path.stat().st_size > 1000


def test_a_checkpoint_that_the_run_removes_while_it_is_read_gives_the_next_one(
    run, monkeypatch, capsys
):
    verify = verify_checkpoint

    def verify_and_remove(folder):
        found = verify(folder)
        if folder.name == "step-00000003":
            shutil.rmtree(folder)
            (run / "checkpoints/step-00000004.later").rename(run / "checkpoints/step-00000004")
        return found

    (run / "checkpoints/step-00000004").rename(run / "checkpoints/step-00000004.later")
    monkeypatch.setattr("learner.durable.stored_policy.verify_checkpoint", verify_and_remove)
    assert export.main(["--run", str(run)]) == 0
    assert "exported step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (lambda run: None, ["--step", "1"], "no checkpoint of step 1; it has 4, 3, 2"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "no complete checkpoint yet"),
        (lambda run: (run / "config.yaml").unlink(), [], "no config.yaml: give the output folder"),
        (
            lambda run: (run / "config.yaml").write_text("model: {path: [1]}"),
            [],
            "config.yaml is not as a run writes it",
        ),
        (
            lambda run: (run / "config.yaml").write_text("model: {path: gone/away}"),
            [],
            "the model that the run started from cannot be read",
        ),
        (
            lambda run: (run / "export-step-4").mkdir() or (run / "export-step-4/x").touch(),
            [],
            "it is not empty and is no earlier export",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(run, change, arguments, said, capsys):
    change(run)
    assert export.main(["--run", str(run), *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_another_model_than_that_of_the_run_is_refused(run, tmp_path, capsys):
    other = write_tiny_model(tmp_path / "other", hidden_size=16)
    assert export.main(["--run", str(run), "--model", str(other)]) == 2
    assert "is of another model: .params" in capsys.readouterr().err


def test_of_supervised_training_the_lowest_held_out_loss_is_the_best(trained, tmp_path):
    run = tmp_path / "sft"
    shutil.copytree(trained / "plain", run)
    with pytest.raises(export.CannotExport, match="no step of .7, 6, 5. was evaluated"):
        export.best_step(run)
    losses = {4: 0.1, 5: 0.9, 6: 0.4, 7: 0.5}
    lines = [{"step": step, "eval/loss": loss} for step, loss in losses.items()]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert export.best_step(run) == 6


def test_a_folder_that_holds_something_is_never_replaced_by_a_given_output(run, capsys):
    other = run.parent / "mine"
    shutil.copytree(run / "export", other)
    for arguments, said in (
        (["--output", str(other)], "must be new or an empty folder"),
        (["--public"], "--public is of --push-to-hub"),
        (["--output", ""], "must be new or an empty folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            export.main(["--run", str(run), *arguments])
        assert said in capsys.readouterr().err
    assert files_of(other) == files_of(run / "export")


def test_an_evaluation_after_the_newest_checkpoint_counts_for_the_best(run):
    assert export.best_step(run) == 2
    line = {"step": 5, "eval/step": 4, "eval/accuracy/strict": 0.95}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert export.best_step(run) == 4


def test_an_upload_that_breaks_off_says_where_the_folder_is(run, hub, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.")

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", broken)
    assert export.main(["--run", str(run), "--push-to-hub", "me/tiny"]) == 1
    said = capsys.readouterr().err
    assert "Error while uploading" in said and f"the folder is {run}/export-step-4" in said


@pytest.fixture
def hub(monkeypatch):
    server = HubServer()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


def test_the_folder_goes_to_a_private_repository_of_the_hub(run, hub, capsys):
    assert export.main(["--run", str(run), "--push-to-hub", "me/tiny"]) == 0
    assert f"uploaded: {hub.address}/me/tiny/commit/1" in capsys.readouterr().out
    assert hub.repositories["me/tiny"]["visibility"] == "private"
    assert hub.files == files_of(run / "export-step-4")


def test_an_upload_that_is_refused_leaves_the_folder_and_says_why(run, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert export.main(["--run", str(run), "--push-to-hub", "me/tiny"]) == 1
    said = capsys.readouterr().err
    assert "the upload to me/tiny failed" in said and "HF_TOKEN" in said and "hf_wrong" not in said
    assert files_of(run / "export-step-4") == files_of(run / "export")
    assert export.main(["--run", str(run), "--push-to-hub", "not/a/name"]) == 1
    assert "not/a/name" in capsys.readouterr().err


def test_an_adapter_is_merged_into_the_model_that_it_belongs_to(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "tiny")
    learner_config = LearnerConfig(
        microbatch_tokens=256,
        compute_dtype="float32",
        optimizer=OptimizerConfig(learning_rate=1e-2),
        lora=LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "up_proj")),
    )
    run = tmp_path / "run"
    spec = learner_spec(model, RunAuthority.create("run"), run, learner=learner_config)
    learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
    learner.publish()
    train(learner, 1, 2)
    learner.save(2, RUN_STATE)
    learner.export(str(run / "export"))
    learner.close()
    settings = {
        "model": {"path": str(model)},
        "learner": {"lora": learner_config.lora.model_dump(mode="json")},
    }
    (run / "config.yaml").write_text(dump_yaml(settings))
    assert export.main(["--run", str(run)]) == 0
    ours, theirs = (load_model(str(run / name)).params for name in ("export-step-2", "export"))
    # Merged by numpy here, and by XLA there.
    close = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, ours, theirs)
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert export.main(["--run", str(run), "--model", str(other)]) == 2
    assert "belongs to another model than" in capsys.readouterr().err
