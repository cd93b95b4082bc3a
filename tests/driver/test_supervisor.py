"""What the supervisor decides without Ray: environments, messages and questions."""

import dataclasses
import threading
import types
from typing import Any

from ray.exceptions import RayActorError

from driver.config.sections.placement import Resources
from driver.config.shell_switches import FIXED
from driver.fleet.actor_calls import message_of
from driver.fleet.cluster import bundle
from driver.fleet.launch import platform_environment
from driver.supervisor import keep_asking, learner_status
from learner.learner_records import LearnerHealth, LearnerInfo
from services.control.messages import LearnerStatus
from services.process.activity import Activity
from services.process.process_memory import ProcessMemory
from services.trajectories.buffer_records import BufferCounts
from tests.deadlines import HANG_S


def test_an_actor_asks_for_what_it_is_given_and_never_for_nothing():
    assert bundle(Resources(cpus=2, tpus=4)) == {"CPU": 2, "TPU": 4}
    assert bundle(Resources(cpus=0)) == {"CPU": 0.001}


def test_two_processes_on_one_gpu_get_their_share_of_memory():
    env = platform_environment("gpu", Resources(gpus=0.5))
    assert env == FIXED | {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"}
    assert platform_environment("gpu", Resources(gpus=1)) == FIXED | {"JAX_PLATFORMS": "cuda"}


def test_half_a_tpu_host_is_named_to_libtpu():
    env = platform_environment("tpu", Resources(tpus=4))
    assert env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert "TPU_PROCESS_BOUNDS" not in platform_environment("tpu", Resources(tpus=8))
    assert platform_environment("cpu", Resources()) == FIXED | {"JAX_PLATFORMS": "cpu"}


def test_the_message_of_an_actor_is_the_end_of_its_traceback():
    error = RayActorError(
        "0123",
        "The actor died because of an error raised in its creation task, ray::A.__init__()\n"
        '  File "actor.py", line 3, in __init__\n'
        "    raise ValueError(text)\n"
        "models.platform.WrongPlatform: placement.platform=tpu, but JAX found cpu;\n"
        "set placement.platform=cpu",
    )
    assert message_of(error) == (
        "models.platform.WrongPlatform: placement.platform=tpu, but JAX found cpu;\n"
        "set placement.platform=cpu"
    )


def test_the_learner_is_absent_then_starting_then_as_it_reports():
    assert learner_status(None, None, 0) is None
    info = LearnerInfo(
        name="learner",
        host="a",
        pid=7,
        devices="1 x NVIDIA H200",
        address="a:1",
        sees_output_folder=True,
        clock_s=1.0,
    )
    assert learner_status(info, None, 1) == LearnerStatus(
        doing="starting", host="a", pid=7, devices="1 x NVIDIA H200", restarts=1
    )
    names = [field.name for field in dataclasses.fields(BufferCounts)]
    health = LearnerHealth(
        problem="",
        doing="update",
        policy_version=4,
        issued_version=3,
        counts=BufferCounts(**dict.fromkeys(names, 0)),
        memory=ProcessMemory(host_bytes=10, device_bytes=20, device_peak_bytes=30),
        activity=Activity(doing="forward_backward", counters={}),
    )
    status = learner_status(info, health, 1)
    assert status is not None and (status.doing, status.issued_version) == ("update", 3)
    assert (status.host_bytes, status.device_peak_bytes) == (10, 30)


def test_a_learner_is_asked_while_the_driver_works_for_long_and_not_after():
    asked = threading.Semaphore(0)
    learner: Any = types.SimpleNamespace(health=asked.release)
    with keep_asking(learner, every_s=0.001):
        for _ in range(3):
            assert asked.acquire(timeout=HANG_S)
    while asked.acquire(blocking=False):
        pass
    assert not asked.acquire(timeout=0.05)
