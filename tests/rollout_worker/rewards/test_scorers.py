"""Built-in scorers, and how names become scorers."""

import sys
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.prompts import load_prompts
from rollout_worker.rewards import scorers as rewards
from rollout_worker.rewards import text_scorers
from rollout_worker.rewards.reward_values import named_rewards
from rollout_worker.rewards.scorers import BadScorer, check_scorer_params, resolve_scorer

pytestmark = pytest.mark.slow

GIVEN = {"prompt": "", "item": {}}


def score(name, completion, answer, **params):
    return named_rewards(name, resolve_scorer(name)(completion, answer=answer, **GIVEN, **params))


@pytest.mark.shared
@pytest.mark.parametrize("case_id", ["A01", "A02", "A03", "A05", "A06", "A08"])
def test_answer_case(cases, case_id):
    for item in cases("answers")[case_id]["items"]:
        gold = item.get("gold", item.get("gold_solution"))
        got = score("gsm8k_answer", item["response"], gold)
        for column, variant in [("strict", "strict"), ("flexible", "lenient")]:
            # The one unspecified answer is an Arabic digit; answers.py reads ASCII digits only.
            expected = 0 if item[column] == "documented" else item[column]
            assert got[f"gsm8k_answer/{variant}"] == expected, (item["response"][:80], variant)
            value = score("gsm8k_answer", item["response"], gold, mode=variant)["gsm8k_answer"]
            assert value == expected


def test_gsm8k_answer_is_strict_by_default():
    assert score("gsm8k_answer", "it is 64", "64") == {
        "gsm8k_answer": 0.0,
        "gsm8k_answer/strict": 0.0,
        "gsm8k_answer/lenient": 1.0,
    }


def test_gsm8k_answer_compares_exactly():
    digits = "12345678901234567890"
    assert score("gsm8k_answer", f"#### {digits}1", f"{digits}2")["gsm8k_answer"] == 0
    assert score("gsm8k_answer", "#### 0.30", "0.3")["gsm8k_answer"] == 1
    assert score("gsm8k_answer", "#### 1/3", "0.3333333333333333")["gsm8k_answer"] == 0


def test_a_gold_answer_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="gold answer 'blue' is not a number"):
        score("gsm8k_answer", "#### blue", "blue")


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("5 + 7 = 12\n#### 12", 1),
        ("#### 12", 1),
        ("so\n#### -1,250.50\n", 1),
        ("so\n####12", 1),
        ("so\n#### 12\nI hope this helps", 0),
        ("so\n#### 12 apples", 0),
        ("so #### 12", 0),
        ("#### 3\nno\n#### 12", 0),
        ("#### 12\n####", 0),
        ("12", 0),
        ("", 0),
    ],
)
def test_default_format_wants_one_marker_line_at_the_end(completion, expected):
    assert score("format", completion, "12") == {"format": expected}


def test_format_matches_the_whole_completion():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    right = "<think>a\nb</think>\n<answer>3</answer>"
    assert score("format", right, "", pattern=pattern) == {"format": 1}
    assert score("format", right + "\njunk", "", pattern=pattern) == {"format": 0}
    assert score("format", "junk" + right, "", pattern=pattern) == {"format": 0}


@pytest.mark.parametrize(
    "completion, answer, expected",
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("\\boxed{72}", "48/2=<<48/2=24>>24\n#### 72", 1),
        ("\\boxed{71}", "72", 0),
        ("I do not know", "72", 0),
        ("0.0000004", "0.0000001", 0),
        ("$0.0000001$", "0.0000001", 1),
        ("$1.0000002$", "1.0000001", 0),
        ("$1.00000000000000000001$", "1.00000000000000000002", 0),
        ("$\\frac{1}{2^{98}}$", "\\frac{1}{2^{99}}", 0),
        ("$\\frac{1}{2^{9998}}$", "\\frac{1}{2^{9999}}", 0),
        ("$\\frac{2}{2^{99}}$", "\\frac{1}{2^{98}}", 1),
        ("$10^{-2000}\\sqrt{2}$", "2 \\times 10^{-2000}\\sqrt{2}", 0),
        ("$\\sqrt{8}$", "2\\sqrt{2}", 1),
        ("$0.333333$", "1/3", 0),
        ("$1.41421356$", "\\sqrt{2}", 0),
        ("$x = 0.0000004$", "0.0000001", 0),
        ("$\\{0.0000004, 1\\}$", "\\{0.0000001, 1\\}", 0),
        ("$\\{\\frac{1}{2^{99}}, 1\\}$", "\\{\\frac{1}{2^{98}}, 1\\}", 0),
        ("$(1, \\frac{1}{2^{99}})$", "(1, \\frac{1}{2^{98}})", 0),
        ("$x = \\frac{1}{2^{99}}$", "x = \\frac{1}{2^{98}}", 0),
        ("$\\{1, 0.5\\}$", "\\{\\frac{1}{2}, 1\\}", 1),
        ("$50\\%$", "0.5", 1),
        ("$9\\%$", "9", 1),
        ("$1{,}234.50$", "1234.5", 1),
        ("\\boxed{7\\text{ thousand}}", "7", 0),
        ("\\boxed{7\\text{ thousand}}", "7000", 1),
        ("\\boxed{7}\\text{ thousand}", "7", 0),
        ("The answer is 7 million.", "7", 0),
        ("The answer is 7 million.", "7,000,000", 1),
        ("\\boxed{2\\text{ dozen}}", "24", 1),
        ("#### 5 thousand", "5", 0),
        ("\\boxed{7_{8}}", "7", 0),
        ("\\boxed{101_2}", "101", 0),
        ("\\boxed{101_2}", "101_2", 1),
        ("\\boxed{101_2}", "1_2", 0),
        ("\\boxed{7\\mathrm{i}}", "7", 0),
        ("5\u00bd", "5", 0),
        ("5\u00bd", "5.5", 1),
        ("\\boxed{7}, of 3 thousand", "7", 1),
    ],
)
def test_math_verify(completion, answer, expected):
    assert score("math_verify", completion, answer) == {"math_verify": expected}


class Words:
    """One token per word."""

    def encode_chat(self, messages, *, tools=()):
        return [len(word) for message in messages for word in message["content"].split()]


def one_item(source, **keys):
    return load_prompts(
        SourceConfig(source=source, size=3, seed=11, skip=2, **keys),
        tokenizer=Words(),
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=10_000,
    ).prompts[1]


def test_reasoning_gym_scores_with_the_task_itself():
    # arc_agi keeps tuples in its items, which JSON does not: the item must be made again.
    prompt = one_item("reasoning_gym:arc_agi")
    scorer = resolve_scorer("reasoning_gym")
    given = {"answer": "", "prompt": prompt.question, "item": prompt.item}
    whole = scorer(prompt.item["answer"], **given, extract="whole")
    assert whole == 1.0
    assert scorer("no marker", **given) == 0.0

    prompt = one_item("reasoning_gym:chain_sum", params={"min_terms": 2, "max_terms": 3})
    given = {"answer": "", "prompt": prompt.question, "item": prompt.item}
    assert scorer(f"1 + 1\n#### 1\nno\n#### **{prompt.item['answer']}**", **given) == 1.0
    assert scorer(f"{prompt.item['answer']}\n#### wrong", **given) == 0.0


def test_reasoning_gym_refuses_items_that_it_did_not_make():
    with pytest.raises(ValueError, match="needs prompts from a reasoning_gym: source"):
        score("reasoning_gym", "#### 1", "1")
    prompt = one_item("reasoning_gym:chain_sum")
    changed = {**prompt.item, "question": "another"}
    with pytest.raises(ValueError, match="item 3 of chain_sum has another question"):
        resolve_scorer("reasoning_gym")("#### 1", answer="", prompt="", item=changed)


@pytest.mark.parametrize(
    "result, expected",
    [
        (0.5, {"f": 0.5}),
        (2, {"f": 2.0}),
        (True, {"f": 1.0}),
        (np.float32(0.5), {"f": 0.5}),
        (np.array([3, 4])[0] == 3, {"f": 1.0}),
        (np.bool_(False), {"f": 0.0}),
        (np.array(0.25), {"f": 0.25}),
        (np.array(True), {"f": 1.0}),
        (np.int64(-3), {"f": -3.0}),
        (Decimal("0.1"), {"f": 0.1}),
        (Fraction(1, 4), {"f": 0.25}),
        (jnp.float32(0.5), {"f": 0.5}),
        ({"value": np.bool_(True), "lenient": Decimal(2)}, {"f": 1.0, "f/lenient": 2.0}),
        ({"value": 1, "lenient": 0.25}, {"f": 1.0, "f/lenient": 0.25}),
    ],
)
def test_results_are_named_N12(result, expected):
    assert named_rewards("f", result) == expected


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "must be a number, got NoneType"),
        ("1.0", "must be a number, got str '1.0'"),
        ([1.0], "must be a number, got list"),
        (np.array([1.0]), "must be a number, got ndarray"),
        (np.array("1.0"), "must be a number, got str '1.0'"),
        (np.array(None), "must be a number, got NoneType"),
        (np.complex128(1), "must be a number, got complex"),
        (1j, "must be a number, got complex"),
        (Decimal("NaN"), "must be finite, got nan"),
        (Decimal("-Infinity"), "must be finite, got -inf"),
        (Decimal("1e999"), "must be finite, got inf"),
        (np.float32("inf"), "must be finite, got inf"),
        (Fraction(10**400), "must be finite, got inf"),
        (float("nan"), "must be finite, got nan"),
        (float("inf"), "must be finite, got inf"),
        ({"reward": 1.0}, r"needs the key 'value', got \['reward'\]"),
        ({"value": 1.0, "why": "x"}, "'why' must be a number"),
        (10**400, "must be finite, got inf"),
        (1.1e6, "must lie between -1e.06 and 1e.06, got 1.1e.06"),
        ({"value": -1e300}, "must lie between -1e.06 and 1e.06"),
        ({"value": 1.0, "\ud800": 1.0}, "names of variants must be printable text"),
    ],
)
def test_results_that_are_no_finite_number_are_errors(result, message):
    with pytest.raises(ValueError, match=message):
        named_rewards("f", result)


@pytest.mark.parametrize(
    "name, message",
    [
        ("gsm8k_anser", "unknown reward function 'gsm8k_anser' .nearest: 'gsm8k_answer'"),
        ("math-verify", "nearest: 'math_verify'"),
        ("nowhere.rewards:score", "cannot import 'nowhere.rewards' .No module named 'nowhere'"),
        ("rewards_x:gsm8k_answr", "nearest: 'gsm8k_answer'"),
        ("my_rewards:scor", "has no 'scor' .nearest: 'score'"),
        ("my_rewards:LIMIT", "must be a function, got int '3': name a def or async def"),
        ("my_rewards:Judge", "must be a function, got type"),
        ("my_rewards:later", "is a generator"),
        (":score", "written package.module:function"),
        ("../own:score", "written package.module:function"),
        ("own:score:more", "written package.module:function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_fix(tmp_path, monkeypatch, name, message):
    (tmp_path / "my_rewards.py").write_text(
        "LIMIT = 3\n"
        "def score(completion, *, answer, prompt, item): return 1.0\n"
        "def later(completion, *, answer, prompt, item): yield 1.0\n"
        "class Judge: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadScorer, match=message):
        resolve_scorer(name)
    sys.modules.pop("my_rewards", None)


def own(completion, *, answer, prompt, item, scale: float, shift: float = 0.0):
    return 1.0


def anything(completion, **given):
    return 1.0


def positional(completion, answer):
    return 1.0


def plain(completion, *, answer, prompt, item, flag: bool = True, n: "int" = 1, text: str = ""):
    return 1.0


@pytest.mark.parametrize(
    "scorer, params, message",
    [
        (own, {"scale": 1, "shfit": 2}, r"no parameter 'shfit' .nearest: 'shift'.; it takes"),
        (own, {}, "missing a required argument: 'scale'"),
        (own, {"scale": 1, "item": 2}, "must not hold 'item'"),
        (positional, {}, "cannot be called as score"),
        (rewards.gsm8k_answer, {"mode": "loose"}, r"one of \['strict', 'lenient'\], got 'loose'"),
        (rewards.answer_format, {"pattern": "("}, "is not a regular expression"),
        (rewards.answer_format, {"pattern": None}, "pattern=None is not a regular expression"),
        (rewards.answer_format, {"pattern": ""}, "pattern='' is the same to every completion"),
        (text_scorers.regex, {"pattern": ""}, "pattern='' is the same to every completion"),
        (plain, {"flag": "no"}, "flag='no' must be of type bool, got str"),
        (plain, {"flag": 0}, "flag=0 must be of type bool, got int"),
        (plain, {"n": "4"}, "n='4' must be of type int, got str"),
        (plain, {"n": True}, "n=True must be of type int, got bool"),
        (plain, {"text": 3}, "text=3 must be of type str, got int"),
        (own, {"scale": "1"}, "scale='1' must be of type float, got str"),
    ],
)
def test_parameters_that_a_scorer_does_not_take_are_refused(scorer, params, message):
    with pytest.raises(BadScorer, match=message):
        check_scorer_params("my:own", scorer, params)


def test_parameters_that_a_scorer_takes_pass():
    check_scorer_params("my:own", own, {"scale": 2})
    check_scorer_params("my:plain", plain, {"flag": False, "n": 2, "text": "x"})
    check_scorer_params("my:anything", anything, {"whatever": 2})


def test_a_reward_at_the_bound_and_a_large_variant_pass():
    got = named_rewards("f", {"value": -1e6, "tokens": 5e9})
    assert got == {"f": -1e6, "f/tokens": 5e9}
