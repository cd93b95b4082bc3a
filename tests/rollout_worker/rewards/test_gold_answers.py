"""Gold answers that a scorer cannot judge are found before a run starts."""

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.gold_answers import find_unjudged
from rollout_worker.rewards.reward_pool import ScoreRequest, validate_functions
from tests.deadlines import HANG_S


def golds(*answers, **item):
    return [ScoreRequest("", answer, "q", item) for answer in answers]


def find(scorer, asked):
    return find_unjudged(scorer, asked, timeout_s=HANG_S)


def test_words_are_no_answers_of_gsm8k_N07():
    asked = golds("x + 3", "(2, 5)", "\\sqrt{7}", "B", "10", "3/4", "", "12 or 13")
    found = find("gsm8k_answer", asked)
    assert sorted(found) == [0, 1, 2, 3, 6, 7]
    assert found[0].startswith("the gold answer 'x + 3' is not a number")
    assert "use math_verify or your own scorer" in found[0]


def test_a_format_judges_whatever_the_gold_answer_is():
    assert find("format", golds("B", "")) == {}


def test_math_verify_takes_expressions_and_no_empty_answer():
    asked = golds("10", "x + 3", "\\sqrt{7}", "")
    found = find("math_verify", asked)
    assert list(found) == [3] and "no expression in the gold answer" in found[3]


def test_reasoning_gym_judges_its_own_items_only():
    found = find("reasoning_gym", [*golds("7"), *golds("", reasoning_gym={"task": "rush_hour"})])
    assert list(found) == [0] and "needs prompts from a reasoning_gym: source" in found[0]


OWN = """
import os, sys, time


def check(answer, item):
    if answer not in item["choices"]:
        raise ValueError(f"{answer!r} is none of {item['choices']}")
    if answer == "C":
        raise KeyError("a mistake of the check itself")


def score(completion, *, answer, prompt, item):
    return float(completion == answer)


def plain(completion, *, answer, prompt, item):
    return float(completion == answer)


score.check_gold = check


def with_check(check):
    def score(completion, *, answer, prompt, item):
        return 1.0

    score.check_gold = check
    return score


async def waiting(answer, item):
    pass


ends = with_check(lambda answer, item: os._exit(3))
hangs = with_check(lambda answer, item: time.sleep(3600))
long = with_check(lambda answer, item: sys.exit("a\\n" + "b" * 5_000_000))
number = with_check(5)
of_answers = with_check(lambda answer: None)
waits = with_check(waiting)
hidden = with_check(lambda answer, item: waiting(answer, item))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "choice.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_scorer_of_the_user_may_offer_a_check(own):
    asked = golds("A", "D", "C", choices=["A", "B", "C"])
    found = find("choice:score", asked)
    assert list(found) == [1, 2]
    assert found[1] == "'D' is none of ['A', 'B', 'C']"
    assert "a mistake of the check itself" in found[2]


def test_a_check_that_hangs_or_ends_is_refused_before_it_takes_hours(own):
    asked = golds(*"123456789", choices=[])
    with pytest.raises(
        ValueError, match=r"'choice:ends'.* gave no answer for 4 of 4 records \(.*3"
    ):
        find("choice:ends", asked)
    with pytest.raises(ValueError, match="'choice:hangs'.*no result within 0.2 s.*timeout_s=0.2"):
        find_unjudged("choice:hangs", asked, timeout_s=0.2)


def test_a_check_that_is_wrong_says_so_in_one_line_without_a_traceback(own, capfd):
    found = find("choice:long", golds("1", "2", choices=[]))
    assert found[0] == f"its check_gold raises SystemExit: a {'b' * 500}"[:500]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "name, problem",
    [
        ("number", "it is of type int"),
        ("of_answers", "too many positional arguments"),
        ("waits", "it is async"),
    ],
)
def test_a_check_that_cannot_be_called_is_refused_with_its_scorer(own, name, problem):
    with pytest.raises(ValueError, match=f"'choice:{name}': its check_gold must be .*{problem}"):
        validate_functions([RewardFunctionConfig(name=f"choice:{name}")])


def test_a_check_that_is_async_behind_a_plain_function_judges_nothing(own):
    found = find("choice:hidden", golds("1", choices=[]))
    assert found[0].startswith("its check_gold raises TypeError: it returns what has to be awaited")


def test_a_scorer_without_a_check_is_taken_at_its_word(own):
    assert find("choice:plain", golds("D", choices=["A"])) == {}
