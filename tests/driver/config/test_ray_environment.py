import pathlib

import pytest

from driver.config import ray_environment
from driver.config.ray_environment import PathTooLong, set_environment

LONG = "/" + "d" * 86
FITS = "/" + "d" * 31


@pytest.fixture(autouse=True)
def no_tpu_logs(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_environment, "TPU_LOGS", tmp_path / "of others" / "tpu_logs")


def of_our_own(tmp_path, **environ):
    set_environment(environ, tmp_path)
    return environ


def test_a_local_cluster_gets_a_secret_token(tmp_path):
    first, second = of_our_own(tmp_path), of_our_own(tmp_path)
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_local_cluster_listens_on_loopback_only_R14(tmp_path):
    assert of_our_own(tmp_path)["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_nothing_is_set_for_a_cluster_that_is_joined(tmp_path):
    joined = of_our_own(tmp_path, RAY_ADDRESS="http://127.0.0.1:8265", TMPDIR=LONG)
    assert set(joined) == {"RAY_ADDRESS", "TMPDIR"}


def test_processes_have_ordinary_priority_unless_the_user_says_otherwise(tmp_path):
    assert of_our_own(tmp_path)["RAY_worker_niceness"] == "0"
    assert of_our_own(tmp_path, RAY_worker_niceness="5")["RAY_worker_niceness"] == "5"


def test_no_workers_are_started_that_no_actor_uses(tmp_path):
    name = "RAY_prestart_worker_first_driver"
    assert of_our_own(tmp_path)[name] == "0"
    assert of_our_own(tmp_path, **{name: "1"})[name] == "1"


def test_a_long_tmpdir_is_not_used_for_sockets_N25(tmp_path):
    environ = of_our_own(tmp_path, TMPDIR=LONG)
    assert (environ["RAY_TMPDIR"], environ["TMPDIR"]) == ("/tmp", LONG)
    umlauts = of_our_own(tmp_path, TMPDIR="/" + "ü" * 20)  # 41 bytes
    assert umlauts["RAY_TMPDIR"] == "/tmp"
    assert "RAY_TMPDIR" not in of_our_own(tmp_path, TMPDIR=FITS)
    assert "RAY_TMPDIR" not in of_our_own(tmp_path)


def test_a_long_folder_that_the_user_chose_for_ray_is_refused(tmp_path):
    with pytest.raises(PathTooLong, match=f"RAY_TMPDIR={LONG} is too long for Ray"):
        of_our_own(tmp_path, RAY_TMPDIR=LONG)
    assert of_our_own(tmp_path, RAY_TMPDIR=FITS, TMPDIR=LONG)["RAY_TMPDIR"] == FITS


def test_without_a_short_folder_the_message_names_both_variables(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_environment, "SHORT", str(tmp_path / "absent"))
    with pytest.raises(PathTooLong, match=f"TMPDIR={LONG} .*set RAY_TMPDIR to a folder"):
        of_our_own(tmp_path, TMPDIR=LONG)


def test_logs_of_other_programs_are_not_shown(tmp_path):
    assert "TPU_LOG_DIR" not in of_our_own(tmp_path) and list(tmp_path.iterdir()) == []
    ray_environment.TPU_LOGS.mkdir(parents=True)
    own = pathlib.Path(of_our_own(tmp_path)["TPU_LOG_DIR"])
    assert own.parent == tmp_path and list(own.iterdir()) == []
    assert of_our_own(tmp_path, TPU_LOG_DIR="/mine")["TPU_LOG_DIR"] == "/mine"
