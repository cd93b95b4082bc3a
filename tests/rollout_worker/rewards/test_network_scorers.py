"""Async scorers that ask a real HTTP server, which stalls, refuses and drops connections."""

import random
from contextlib import ExitStack, closing

import pytest

from benchmarks.rewards.judge_server import JudgeServer
from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

TIMEOUT_S = 4.0
ERRORS = {
    "429": "ValueError: the judge answers HTTP/1.1 429",
    "500": "ValueError: the judge answers HTTP/1.1 500",
    "drop": "IncompleteReadError: 0 bytes read",
    "cut": "IncompleteReadError: ",
    "stall": "no result within 4 s",
    "busy": "ValueError: the judge answers HTTP/1.1 429",
}


@pytest.fixture
def server():
    with JudgeServer(delay_s=0.02) as server:
        yield server


def pool_of(server, scorer="ask", timeout_s=TIMEOUT_S, **keys):
    name = f"benchmarks.rewards.http_scorers:{scorer}"
    function = RewardFunctionConfig(name=name, params={"port": server.port})
    return closing(RewardPool([function], processes=1, timeout_s=timeout_s, **keys))


def groups_of(pool, actions):
    """Submits groups of four; returns (action, number, score) of each completion."""
    texts = [f"{action} {number}" for number, action in enumerate(actions)]
    pending = [
        pool.submit([ScoreRequest(text, "", "", {}) for text in texts[start : start + 4]])
        for start in range(0, len(texts), 4)
    ]
    scores = [score for group in pending for score in group.wait()]
    assert len(scores) == len(actions), "no group is lost"
    return list(zip(actions, range(len(actions)), scores, strict=True))


def test_every_failure_of_a_server_is_an_error_and_no_reward_is_lost_or_zero(server):
    actions = ["ok"] * 40 + [*ERRORS] * 4
    random.Random(0).shuffle(actions)
    with pool_of(server, in_flight=16) as pool:
        found = groups_of(pool, actions)
    for action, number, score in found:
        if action == "ok":
            assert (score.total, score.error) == (number, "")
        else:
            assert ERRORS[action] in score.error and score.rewards == {}
    assert sum(bool(score.error) for *_, score in found) == 4 * len(ERRORS)
    assert server.requests == len(actions), "each is asked for once"


def test_a_scorer_that_asks_again_gets_its_reward_in_the_end(server):
    actions = ["busy", "ok"] * 10 + ["500", "drop"]
    with pool_of(server, "ask_patiently", timeout_s=HANG_S) as pool:
        for action, number, score in groups_of(pool, actions):
            if action in ("busy", "ok"):
                assert (score.total, score.error) == (number, "")
            else:
                assert ERRORS[action] in score.error
    assert server.requests == 10 * 2 + 10 + 2 * 3


def test_a_server_that_is_gone_is_an_error_of_every_completion():
    with ExitStack() as stack:
        with JudgeServer() as server:
            pool = stack.enter_context(pool_of(server))
            assert groups_of(pool, ["ok"])[0][2].error == ""
        for _, _, score in groups_of(pool, ["ok"] * 8):
            assert "ConnectionRefusedError" in score.error


def test_as_many_requests_wait_at_the_server_as_may_be_in_flight():
    with JudgeServer(delay_s=1.0) as server, pool_of(server, timeout_s=HANG_S, in_flight=8) as pool:
        assert all(not score.error for *_, score in groups_of(pool, ["ok"] * 24))
        assert server.most_at_once == 8
