"""What each process of a run is given."""

import datetime
import pathlib

from driver.config.actor_specs import ActorSpecs
from driver.config.run_config import RunConfig
from services.trajectories.data_order import DataOrder
from services.wire.tls import RunAuthority


def test_every_worker_gets_the_moment_of_the_run_whenever_it_starts_N16():
    moment = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=datetime.UTC)
    specs = ActorSpecs(
        config=RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"train": {"source": "a.jsonl"}}, "eval": OFF}
        ),
        folder=pathlib.Path("out"),
        run_id="run",
        authority=RunAuthority.create("run"),
        driver_host="127.0.0.1",
        order=DataOrder.of_one(0, 8),
        moment=moment,
    )
    names = ("rollout-0", "rollout-0", "rollout-1")
    assert {specs.worker(name, "127.0.0.1:1").moment for name in names} == {moment}


OFF = {"at_start": False, "at_end": False}
