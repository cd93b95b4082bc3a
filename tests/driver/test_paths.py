"""Where runs read and write, in a checkout and in an unpacked Ray job."""

import pathlib

import pytest

from driver import paths, settings

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
    assert paths.output_folder(config) == tmp_path / "runs" / "mine"


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
        paths.output_folder(config.model_copy(update={"run": run}))


def test_hub_ids_and_missing_files_pass_unchanged(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.locate(config) == config


def test_a_folder_with_another_run_is_not_written_into(tmp_path):
    paths.claim(tmp_path / "new", resume=False)
    (tmp_path / "new" / "metrics.jsonl").touch()
    with pytest.raises(paths.FolderTaken, match="--resume"):
        paths.claim(tmp_path / "new", resume=False)
    paths.claim(tmp_path / "new", resume=True)
    with pytest.raises(paths.FolderTaken, match="cannot be made"):
        paths.claim(tmp_path / "new" / "metrics.jsonl" / "below", resume=False)
