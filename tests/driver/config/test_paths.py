"""Where runs read and write, in a checkout and in an unpacked Ray job."""

import errno
import fcntl
import os
import pathlib
import shutil

import pytest

from driver.config import load_config as settings
from driver.config import paths
from rollout_worker.config.data_config import SourceConfig

CONFIG = """
model: {path: models/mine}
data: {train: {source: data/train.jsonl}}
eval: {at_start: false, at_end: false}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return settings.load(str(file), ["run.name=mine"])


def test_outputs_go_to_the_working_directory(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(paths.HOME_VARIABLE, raising=False)
    assert paths.output_folder(config.run) == tmp_path / "runs" / "mine"


def test_outputs_of_a_ray_job_survive_it():
    cwd = pathlib.Path("/tmp/ray/session/working_dir_files/_ray_pkg_0123")
    assert paths.home({}, cwd) == pathlib.Path.home() / "tandem"
    assert paths.home({paths.HOME_VARIABLE: "/data"}, cwd) == pathlib.Path("/data")


def test_inputs_that_the_job_lacks_are_found_under_home(config, tmp_path, monkeypatch):
    job, home = tmp_path / "_ray_pkg_0123", tmp_path / "home"
    (job / "data").mkdir(parents=True)
    (job / "data" / "train.jsonl").touch()
    (home / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(job)
    monkeypatch.setenv(paths.HOME_VARIABLE, str(home))
    located = paths.locate(config)
    assert located.model.path == str(home / "models" / "mine")
    assert located.data.train.source == "data/train.jsonl", "each actor unpacks its own"


def test_every_training_source_becomes_absolute(config, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    several = [{"source": "a.jsonl"}, {"source": "some/hub"}]
    data = type(config.data).model_validate({"train": several})
    located = paths.locate(config.model_copy(update={"data": data}))
    assert [one.source for one in located.data.train] == [str(tmp_path / "a.jsonl"), "some/hub"]


def test_inputs_outside_a_job_become_absolute_since_actors_start_elsewhere(
    config, tmp_path, monkeypatch
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert paths.locate(config).data.train.source == str(tmp_path / "data" / "train.jsonl")


def test_a_folder_named_by_the_time_cannot_be_resumed(config):
    run = config.run.model_copy(update={"output_dir": "runs/{time}", "resume": True})
    with pytest.raises(paths.FolderTaken, match="--set run.output_dir=FOLDER"):
        paths.output_folder(run)


def test_hub_ids_and_missing_files_pass_unchanged(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.locate(config) == config


def test_an_empty_path_is_not_the_working_directory(config):
    empty = config.model_copy(
        update={"data": config.data.model_copy(update={"train": SourceConfig(source="")})}
    )
    assert paths.locate(empty).data.train.source == ""


def test_a_folder_with_another_run_is_not_written_into(tmp_path):
    folder = tmp_path / "new"
    paths.check_folder(folder, resume=False)
    assert not folder.exists(), "looking must not make it"
    paths.lock_folder(folder).close()
    paths.clear_folder(folder, resume=False)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(paths.FolderTaken, match=r"it contains metrics.jsonl\): .* --resume"):
        paths.check_folder(folder, resume=False)
    paths.check_folder(folder, resume=True)


def test_what_a_failed_start_left_does_not_block_the_next_try(tmp_path):
    for name in ("status.json", "run_id", "identity.json", "error.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "metrics.jsonl").touch()
    paths.check_folder(tmp_path, resume=False)


@pytest.mark.parametrize(
    "name", [".identity.json.71-72.part", ".config.yaml.71-72.part", ".status.71.tmp"]
)
def test_what_a_killed_start_was_writing_does_not_block_the_next_and_goes(tmp_path, name):
    (tmp_path / name).write_text("{")
    paths.check_folder(tmp_path, resume=False)
    for resume in (True, False):
        (tmp_path / name).write_text("{")
        paths.clear_folder(tmp_path, resume=resume)
        assert list(tmp_path.iterdir()) == []


def test_a_spool_that_cannot_be_removed_is_named_and_one_that_is_a_link_goes(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "step-00000000.bin").touch()
    folder.mkdir()
    (folder / "spool").symlink_to(elsewhere)
    paths.clear_folder(folder, resume=False)
    assert list(folder.iterdir()) == [] and list(elsewhere.iterdir())
    (folder / "spool").mkdir()

    def busy(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.raises(paths.FolderTaken, match="spool of an earlier try cannot be removed .*busy"):
        paths.clear_folder(folder, resume=False)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_other_driver(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: fail(number))
    paths.lock_folder(tmp_path).close()
    assert f"the file system of {tmp_path} has no locks" in capsys.readouterr().err


def test_a_lock_that_cannot_be_asked_for_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: fail(errno.EIO))
    with pytest.raises(paths.FolderTaken, match="cannot be locked .Input/output error"):
        paths.lock_folder(tmp_path)


def fail(number):
    raise OSError(number, os.strerror(number))


def test_a_folder_below_a_file_or_without_permission_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "below", pathlib.Path("/proc/nothing")):
        with pytest.raises(paths.FolderTaken, match="choose another"):
            paths.check_folder(folder, resume=False)
            paths.lock_folder(folder)


def test_a_tilde_is_the_home_folder(config):
    run = config.run.model_copy(update={"output_dir": "~/somewhere"})
    changed = config.model_copy(update={"run": run})
    assert paths.output_folder(changed.run) == pathlib.Path.home() / "somewhere"


def test_a_try_that_never_took_a_step_leaves_no_groups_to_the_next(tmp_path):
    for name in ("spool", "stacks", "control"):
        (tmp_path / name).mkdir()
    (tmp_path / "spool" / "step-00000000.bin").touch()
    (tmp_path / "postmortem-20260101T000000Z.tar.gz").touch()
    paths.check_folder(tmp_path, resume=False)
    paths.clear_folder(tmp_path, resume=True)
    assert (tmp_path / "spool").is_dir(), "a resume goes on from what was accepted"
    paths.clear_folder(tmp_path, resume=False)
    assert not (tmp_path / "spool").exists()


def test_two_drivers_never_work_in_one_folder(tmp_path):
    folder = tmp_path / "run"
    with paths.lock_folder(folder):
        with pytest.raises(paths.FolderTaken, match=f"another driver .process {os.getpid()} on "):
            paths.lock_folder(folder)
        paths.check_folder(folder, resume=False)
    paths.lock_folder(folder).close()


def test_a_teacher_becomes_absolute_as_the_model_does(config, tmp_path, monkeypatch):
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    distillation = {"teacher": "teacher"}
    algorithm = type(config.algorithm).model_validate({"distillation": distillation})
    located = paths.locate(config.model_copy(update={"algorithm": algorithm}))
    assert located.algorithm.distillation.teacher == str(tmp_path / "teacher")
    assert paths.locate(config).algorithm.distillation is None


def test_an_adapter_to_start_from_becomes_absolute_too(config, tmp_path, monkeypatch):
    (tmp_path / "adapter").mkdir()
    monkeypatch.chdir(tmp_path)
    learner = type(config.learner).model_validate({"lora": {"rank": 8, "init_from": "adapter"}})
    located = paths.locate(config.model_copy(update={"learner": learner}))
    assert located.learner.lora.init_from == str(tmp_path / "adapter")
    assert paths.locate(config).learner.lora is None
