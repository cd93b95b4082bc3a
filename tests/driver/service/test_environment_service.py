"""A run with an environment: processes that are killed in the middle of episodes change nothing."""

import os
import signal

import pytest

from tests.deadlines import HANG_S
from tests.driver.service_run import ONE_WORKER, Service, same_training, write_model_and_data
from tests.rollout_worker.environments.test_environment_pool import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.service]

STEPS, PROMPTS = 3, 4


def start(folder, model) -> Service:
    """A run of the demo model, whose random talk has several turns."""
    settings = {
        "run.steps": STEPS,
        "model.path": "deploy/demo/model",
        "environment.name": f"{KINDS}:Held",
        "environment.params": f"{{folder: {folder}}}",
        "environment.max_turns": 4,
        "environment.timeout_s": HANG_S,
        "reward.functions": "[{name: environment}]",
        "rollout.max_completion_tokens": 96,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return Service(folder, model, *sets, *ONE_WORKER)


def held(folder) -> list[int]:
    """The processes of environments that have waited so far."""
    path = folder / "held"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_environment_and_worker_that_are_killed_in_mid_episode_change_no_bit(
    tmp_path_factory, tmp_path
):
    model = write_model_and_data(tmp_path_factory.mktemp("model"))
    (tmp_path / "hold").touch()
    service = start(tmp_path, model)
    undisturbed = None
    try:
        service.wait_for(lambda: bool(held(tmp_path)), "an episode that waits")
        first = held(tmp_path)[0]
        os.kill(first, signal.SIGKILL)
        service.wait_for(lambda: any(pid != first for pid in held(tmp_path)), "it in another one")
        os.kill(service.pid_of("rollout-0"), signal.SIGKILL)
        service.wait_for(lambda: "rollout-0 failed, restart 1 of 3" in service.text, "the loss")
        (tmp_path / "hold").unlink()
        assert service.wait() == 0, service.text
        undisturbed = start(tmp_path_factory.mktemp("undisturbed"), model)
        assert undisturbed.wait() == 0, undisturbed.text
    finally:
        for one in (service, undisturbed):
            if one is not None:
                one.kill()
    expected = [f"g{index:08d}" for index in range(PROMPTS * STEPS)]
    assert sorted(service.trained()) == expected
    metrics = service.lines("metrics")
    assert metrics[-1]["workers/restarts"] == 1
    assert all(line["reward_error/count"] == 0 for line in metrics if "reward_error/count" in line)
    assert max(line.get("rollout/turns_mean", 0) for line in metrics) > 1
    assert any(line.get("environment/calls", 0) > 0 for line in metrics)
    same_training(service, undisturbed)
