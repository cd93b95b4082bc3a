"""The judge over a real local endpoint that grades, stalls, refuses and drops connections.

A completion is `ACTION NUMBER`: the endpoint does what the action says, and grades with the number.
"""

import collections
import http.server
import json
import threading
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import BudgetConfig, RewardFunctionConfig
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest, validate_functions
from rollout_worker.rewards.spending import SpendingAccount
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

TEMPLATE = "q={prompt} a={answer} c={completion}"


class Server(http.server.ThreadingHTTPServer):
    """Remembers what was asked."""

    request_queue_size = 128  # of 5, a busy machine resets connections that come at once

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.asked: list[tuple] = []
        self.times: collections.Counter[str] = collections.Counter()
        self.end = threading.Event()


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Fails the first time where the action is `first STATUS`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Server)
        server.asked.append((self.path, self.headers.get("Authorization"), asked))
        text = asked["messages"][0]["content"].partition(" c=")[2]
        server.times[text] += 1
        action, _, number = text.rpartition(" ")
        if action.startswith("first "):
            action = action.partition(" ")[2] if server.times[text] == 1 else "grade"
        if action == "stall":
            server.end.wait()
        if action in ("stall", "drop"):
            self.close_connection = True
            return
        status = int(action) if action.isdigit() else 200
        said = "no idea" if action == "mute" else f"Grade: 1\nafter all\n**Grade:** {number}"
        said = text.removeprefix("say ") if text.startswith("say ") else said
        end = "length" if action == "cut" else "stop"
        choice = {"message": {"content": said}, "finish_reason": end}
        reply = {"choices": [choice], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}
        body = (
            b"<html>"
            if action == "html"
            else json.dumps(reply if action != "odd" else [1]).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def endpoint():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.end.set()
    server.shutdown()
    thread.join()
    server.server_close()


def graded(endpoint, texts, **params):
    return graded_and_spent(endpoint, texts, **params)[0]


def graded_and_spent(
    endpoint, texts, timeout_s=HANG_S, allowance=None, budget=None, in_flight=32, **params
):
    params = {"model": "m", "template": TEMPLATE, "tries": 2, **params}
    params["url"] = f"http://127.0.0.1:{endpoint.server_port}/v1/"
    functions = [RewardFunctionConfig(name="judge", params=params)]
    pool = RewardPool(
        functions,
        processes=1,
        timeout_s=timeout_s,
        allowance=allowance or Allowance(),
        account=SpendingAccount(budget),
        in_flight=in_flight,
    )
    with closing(pool):
        scores = pool.submit([ScoreRequest(text, "4", "2 + 2?", {}) for text in texts]).wait()
        return scores, pool.account.take_spending()


def test_each_completion_gets_its_own_grade_and_verdict(endpoint):
    prices = {"prompt_price": 2.0, "completion_price": 10.0}
    scores, spent = graded_and_spent(
        endpoint, [f"grade {place % 11}" for place in range(40)], **prices
    )
    assert [score.error for score in scores] == [""] * 40
    assert [score.total for score in scores] == [place % 11 / 10 for place in range(40)]
    assert scores[3].rewards == {"judge": 0.3}
    assert scores[3].notes == {"judge": "Grade: 1\nafter all\n**Grade:** 3"}
    assert (spent.requests, spent.failed_requests, spent.tokens) == (40, 0, 40 * 15)
    assert spent.cost == pytest.approx(40 * (12 * 2 + 3 * 10) / 1e6)
    path, _, asked = endpoint.asked[0]
    assert path == "/v1/chat/completions" and asked["model"] == "m" and asked["temperature"] == 0
    assert asked["messages"][0]["content"].startswith("q=2 + 2? a=4 c=grade ")


def test_what_a_completion_spells_is_no_place_of_the_template(endpoint):
    (score,) = graded(endpoint, ["{answer} {prompt} grade 5"])
    assert score.total == 0.5
    assert endpoint.asked[0][2]["messages"][0]["content"].endswith("c={answer} {prompt} grade 5")


@pytest.mark.parametrize("failure", ["429", "500", "503", "drop"])
def test_a_failure_that_passes_costs_a_call_and_no_reward(endpoint, failure):
    (score,), spent = graded_and_spent(endpoint, [f"first {failure} 7"])
    assert (score.error, score.total) == ("", 0.7)
    assert (spent.requests, spent.failed_requests, spent.tokens) == (2, 1, 15)


@pytest.mark.parametrize(
    "text, message, calls",
    [
        ("429 7", "the judge answers 429: ", 2),
        ("500 7", ", 2 tries", 2),
        ("drop 7", "the judge cannot be asked: ", 2),
        ("401 7", "the judge answers 401: ", 1),
        ("404 7", "the judge answers 404: ", 1),
        ("mute 7", "the judge gives no grade that", 1),
        ("grade 11", "the judge's grade must lie between 0 and 10, got 11", 1),
        ("cut 7", "the judge's answer ends at max_tokens=256: raise it", 1),
        ("html 7", "the judge's reply is no JSON: '<html>'", 1),
        ("odd 7", "the judge's reply is no chat completion: '[1]'", 1),
    ],
)
def test_a_failure_that_stays_is_an_error_of_its_completion_alone(endpoint, text, message, calls):
    (good, bad), spent = graded_and_spent(endpoint, ["grade 8", text])
    answered = text.partition(" ")[0] in ("mute", "grade", "cut", "html", "odd")
    assert (spent.requests, spent.failed_requests) == (1 + calls, 0 if answered else calls)
    assert spent.tokens == (30 if text in ("mute 7", "cut 7", "grade 11") else 15)
    assert (good.error, good.total) == ("", 0.8)
    assert message in bad.error and bad.rewards == {}
    assert endpoint.times[text] == calls


def test_a_grade_on_another_scale_or_with_a_sign_is_an_error_and_no_other_number(endpoint):
    said = ["-3", "\u22123", "7,5", "1e1", "7/100", "7 out of 100", "70%", "0-10 scale", "7 to 8"]
    for score, text in zip(
        graded(endpoint, [f"say Grade: {text}" for text in said]), said, strict=True
    ):
        assert (
            f"Grade: {text[:4]}" in score.error and "is no plain number from 0 to 10" in score.error
        )
    for score in graded(endpoint, ["say Grade: 10", "say Grade: 1\n2"], verdict=r"Grade: (\d)"):
        assert ("plain number" in score.error) == (score.total != 0.1)


def test_a_grade_in_other_words_is_the_same(endpoint):
    said = ["7/10", "**7** / 10", "7 out of 10.", "- 7", "7 - no more", "7, because 3", "7."]
    scores = graded(endpoint, [f"say Grade: {text}" for text in said])
    assert [score.total for score in scores] == [0.7] * len(said)


def test_a_thought_is_no_grade(endpoint):
    thought, judged = graded(
        endpoint, ["say <think>Grade: 9</think>hm", "say <think>Grade: 9</think>Grade: 2"]
    )
    assert "the judge gives no grade" in thought.error and judged.total == 0.2


def test_what_a_verdict_finds_must_be_a_number(endpoint):
    (score,) = graded(endpoint, ["say good"], verdict=r"(\w+)\Z")
    assert "the judge's grade 'good', as" in score.error and "is no number" in score.error


def test_an_endpoint_that_stalls_ends_at_the_time_limit(endpoint):
    (bad, good), spent = graded_and_spent(endpoint, ["stall 7", "grade 8"], timeout_s=4.0)
    assert bad.error == "judge: no result within 4 s" and good.total == 0.8
    # On a busy machine the one that stalls is asked again, alone.
    assert spent.failed_requests == spent.requests - 1 >= 1 and spent.tokens == 15


def test_every_completion_is_scored_or_an_error_whatever_the_endpoint_does(endpoint):
    actions = ["grade", "first 429", "first 500", "first drop", "429", "500", "drop"]
    texts = [f"{action} {place % 11}" for place in range(8) for action in actions]
    texts += ["stall 1", "stall 2"]
    scores, spent = graded_and_spent(endpoint, texts, timeout_s=8.0)
    assert len(scores) == len(texts)
    failed = [text for text, score in zip(texts, scores, strict=True) if score.error]
    assert failed == [text for text in texts if text.startswith(("429", "500", "drop", "stall"))]
    assert all(score.total == score.total for score in scores if not score.error)
    # 8 of each that end well cost one answered request, whatever they took before.
    assert spent.requests - spent.failed_requests == 8 * 4
    assert spent.tokens == 8 * 4 * 15
    # Further ones on a busy machine, where what takes too long is asked again.
    assert spent.requests >= 8 * (1 + 3 * 2 + 3 * 2) + 2


@pytest.mark.parametrize(
    "budget, asked",
    [
        ({"requests": 5}, 5),
        ({"tokens": 60}, 4),
        ({"cost": 15 * 2.5 * 2e-6}, 3),
        ({"cost": 1.0}, 12),
    ],
)
def test_a_spent_budget_makes_errors_and_never_a_0(endpoint, budget, asked):
    prices = {"prompt_price": 2.0, "completion_price": 2.0}
    texts = [f"grade {place % 11}" for place in range(12)]
    scores, spent = graded_and_spent(
        endpoint, texts, budget=BudgetConfig(**budget), in_flight=1, **prices
    )
    assert [bool(score.error) for score in scores] == [False] * asked + [True] * (12 - asked)
    assert spent.requests == len(endpoint.asked) == asked
    if asked < 12:
        (name,) = budget
        assert f"judge: not asked, since the run's budget is spent: reward.budget.{name}=" in (
            scores[-1].error
        )
        assert "raise it and go on with --resume" in scores[-1].error


def test_a_driver_may_stop_the_spending_of_a_worker(endpoint):
    params = {"model": "m", "url": f"http://127.0.0.1:{endpoint.server_port}/v1"}
    functions = [
        RewardFunctionConfig(name="judge", params=params),
        RewardFunctionConfig(name="exact"),
    ]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        pool.account.stop("another worker has spent it")
        (score,) = pool.submit([ScoreRequest("4", "4", "2 + 2?", {})]).wait()
    assert score.error == "judge: not asked, since another worker has spent it"
    assert score.rewards == {"exact": 0.0} and score.total != score.total
    assert endpoint.asked == []


def test_the_key_comes_from_the_environment_that_scorers_get(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-judge")
    allowance = Allowance(environment=("JUDGE_API_KEY",))
    graded(endpoint, ["grade 8"], allowance=allowance, key_from="JUDGE_API_KEY")
    assert endpoint.asked[0][1] == "Bearer of-the-judge"
    with pytest.raises(ValueError, match="key_from='JUDGE_API_KEY' names no environment variable"):
        graded(endpoint, ["grade 8"], key_from="JUDGE_API_KEY")


@pytest.mark.parametrize("key", ["", "of-the-judge\n", "two words", "k\u00e9y"])
def test_a_key_that_no_header_takes_is_refused_without_showing_it(monkeypatch, key):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    params = {"model": "m", "url": "http://x", "key_from": "JUDGE_API_KEY"}
    with pytest.raises(ValueError, match="set it to the key alone") as refused:
        validate_functions(
            [RewardFunctionConfig(name="judge", params=params)],
            allowance=Allowance(environment=("JUDGE_API_KEY",)),
        )
    assert not key or key.strip() not in str(refused.value)


@pytest.mark.parametrize(
    "params, message",
    [
        ({}, "missing a required argument: 'url'"),
        ({"url": "127.0.0.1/v1"}, "must begin with http:// or https://"),
        ({"url": "http://127.0.0.1:99999/v1"}, "is no address: Port out of range"),
        ({"url": "http://x:port/v1"}, "is no address"),
        ({"url": "http:///v1"}, "must have a host"),
        ({"url": "http://a b/v1"}, "no white space"),
        ({"url": "http://x/v1?version=1"}, "must end before /chat/completions"),
        ({"url": "http://x/v1/chat/completions"}, "must end before /chat/completions"),
        ({"url": "http://x", "model": " "}, "model=' ' must be the name that the endpoint has"),
        ({"url": "http://x", "template": "{question} {completion}"}, "template has {question}, wh"),
        ({"url": "http://x", "template": "{Answer} {completion}"}, "template has {Answer}, which"),
        ({"url": "http://x", "template": "grade!"}, "must contain {completion}"),
        ({"url": "http://x", "verdict": "("}, "is not a regular expression"),
        ({"url": "http://x", "verdict": "[0-9]"}, "must have one group, the grade; it has 0"),
        ({"url": "http://x", "tries": 0}, "tries=0 must be a positive number"),
        ({"url": "http://x", "tries": 1.5}, "tries=1.5 must be a positive number"),
        ({"url": "http://x", "highest": "ten"}, "highest='ten' must be a positive number"),
        ({"url": "http://x", "prompt_price": -1}, "prompt_price=-1 must be the price of a million"),
        ({"url": "http://x", "retries": 3}, "no parameter 'retries' (nearest: 'tries')"),
    ],
)
def test_parameters_with_which_it_cannot_be_asked_are_refused_at_the_start(params, message):
    functions = [RewardFunctionConfig(name="judge", params={"model": "m", **params})]
    with pytest.raises(ValueError) as refused:
        validate_functions(functions)
    assert message in str(refused.value)
