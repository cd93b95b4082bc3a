"""What the tests of services share: one authority, small groups, real servers."""

import contextlib
import dataclasses

import numpy as np
import pytest

from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.service import trajectory_service
from services.weights.replica import Replica
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire.channel import PIECE_BYTES
from services.wire.messages import Completion, FinishReason, Group
from services.wire.server import Server
from services.wire.tls import RunAuthority
from tests.services.group_rules import group_rules
from tests.services.weights.weight_tools import CHUNK_BYTES, version

RUN_ID = "run-a"
DIGEST = "d" * 64


@pytest.fixture(scope="session")
def authority() -> RunAuthority:
    return RunAuthority.create(RUN_ID)


@pytest.fixture(scope="session")
def credentials(authority):
    """Of a rollout worker."""
    return authority.issue("rollout-0")


@pytest.fixture(scope="session")
def make_completion():
    def make(sample_index: int = 0, **changes) -> Completion:
        completion = Completion(
            sample_index=sample_index,
            token_ids=np.array([11, 12, 2], np.int32),
            behavior_logprobs=np.array([-0.5, -1.25, -0.125], np.float32),
            finish_reason=FinishReason.STOP,
            rewards={"gsm8k_answer": 1.0},
            total_reward=1.0,
        )
        return dataclasses.replace(completion, **changes)

    return make


@pytest.fixture(scope="session")
def make_group(make_completion):
    """Builds a group of two completions that a buffer with (0, DIGEST) issued accepts."""

    def make(group_id: str = "g1", **changes) -> Group:
        group = Group(
            run_id=RUN_ID,
            group_id=group_id,
            attempt=0,
            prompt_id=3,
            epoch=0,
            policy_version=0,
            weight_digest=DIGEST,
            worker="rollout-0",
            prompt_token_ids=np.array([5, 6], np.int32),
            completions=(make_completion(0), make_completion(1)),
            phase_s={"prefill": 0.25, "decode": 1.5},
        )
        return dataclasses.replace(group, **changes)

    return make


@pytest.fixture(scope="session")
def make_buffer():
    def make(**changes) -> GroupBuffer:
        sizes = {"capacity_groups": 8, "capacity_bytes": 2**20, "max_staleness": 0}
        return GroupBuffer(group_rules(RUN_ID), **{**sizes, **changes})

    return make


@pytest.fixture
def serve(authority):
    """Starts servers of the learner, and stops them at the end of the test."""
    with contextlib.ExitStack() as servers:

        def start(
            *, store=None, buffer=None, port=0, chunk_bytes=PIECE_BYTES, **trajectories
        ) -> Server:
            services = [weight_service(store or WeightStore(RUN_ID, 2), chunk_bytes=chunk_bytes)]
            if buffer is not None:
                services.append(trajectory_service(buffer, **trajectories))
            return servers.enter_context(Server(authority.issue("learner"), services, port=port))

        yield start


@pytest.fixture
def learner(serve):
    """A server and its store, which holds policy version 4 of `weight_tools`."""
    store = WeightStore(RUN_ID, 2)
    store.publish(4, version(4))
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    return server, store


@pytest.fixture
def make_replica(credentials):
    """Builds workers' copies, and closes them at the end of the test."""
    with contextlib.ExitStack() as replicas:

        def make(**options) -> Replica:
            options = {"patience_s": 5.0, "chunk_bytes": CHUNK_BYTES} | options
            return replicas.enter_context(Replica(credentials, run_id=RUN_ID, **options))

        yield make
