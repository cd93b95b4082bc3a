"""What each process of a run is given."""

import datetime
import pathlib

import pytest

from driver.config.actor_specs import ActorSpecs
from driver.config.run_config import RunConfig
from services.process.driver_lease import LEASE_S
from services.trajectories.data_order import DataOrder
from services.wire.tls import RunAuthority

MOMENT = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=datetime.UTC)
OFF = {"at_start": False, "at_end": False}


@pytest.fixture(scope="module")
def specs():
    return ActorSpecs(
        config=RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"train": {"source": "a.jsonl"}}, "eval": OFF}
        ),
        folder=pathlib.Path("out"),
        run_id="run",
        authority=RunAuthority.create("run"),
        driver_host="127.0.0.1",
        order=DataOrder.of_one(0, 8),
        moment=MOMENT,
    )


def test_every_worker_gets_the_moment_of_the_run_whenever_it_starts_N16(specs):
    names = ("rollout-0", "rollout-0", "rollout-1")
    assert {specs.worker(name, "127.0.0.1:1").moment for name in names} == {MOMENT}


def test_every_process_is_to_end_once_the_driver_asks_it_nothing_F03(specs):
    spec = specs.worker("rollout-0", "127.0.0.1:1")
    assert {specs.learner().driver_lease_s, spec.driver_lease_s} == {LEASE_S}
