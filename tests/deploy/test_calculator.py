"""The calculator demo: its conversations against the real tool, and the room that its run has."""

import asyncio
import itertools
import sys

import pytest

from deploy.demo import calculator
from driver.config.load_config import load_as
from driver.config.prepare import prepare
from driver.config.run_config import RunConfig
from driver.sft.sft_config import SftConfig
from driver.sft.sft_plan import plan_training
from models.load_tokenizer import load_tokenizer
from rollout_worker.environments.tools.tool_environment import ToolEnvironment

RUN, WARM_START = "deploy/runs/calculator_cpu.yaml", "deploy/demo/calculator_sft.yaml"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the records, as the command of the demo writes them."""
    folder = tmp_path_factory.mktemp("calculator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["calculator", "--output", str(folder)])
        calculator.main()
    return folder


@pytest.fixture(scope="module")
def template():
    return load_as(SftConfig, WARM_START, []).model.chat_template


def first(count):
    return list(itertools.islice(calculator.conversations(), count))


def played(turns, question, answer):
    """Turns of a model in the environment of the run.

    Returns:
        its answers, and for each turn the reward, whether the episode is over, and the counts.
    """
    config = load_as(RunConfig, RUN, []).environment
    assert config is not None
    environment = ToolEnvironment(**config.params)

    async def play():
        await environment.reset({"question": question, "answer": answer}, 0)
        return [await environment.step({"role": "assistant", "content": turn}) for turn in turns]

    steps = asyncio.run(play())
    return [m for messages, *_ in steps for m in messages], [step[1:] for step in steps]


def test_the_made_up_calls_are_answered_as_the_conversations_say_and_win():
    for record in first(20):
        question, call, result, answer = record["messages"]
        left, right = question["content"].removeprefix("What is ").removesuffix("?").split("*")
        gold = str(int(left) * int(right))
        heard, steps = played([call["content"], answer["content"]], question["content"], gold)
        assert heard == [result] and result["content"] == gold
        counted = {"tool_calls": 1.0, "malformed_calls": 0.0, "failed_calls": 0.0}
        none = dict.fromkeys(counted, 0.0)
        assert steps == [(0.0, False, counted), (1.0, True, none)]


def test_a_guess_ends_the_episode_and_wins_only_by_luck():
    for guess, reward in (("1692", 1.0), ("1693", 0.0)):
        heard, [(given, done, counts)] = played([guess], "What is 47*36?", "1692")
        assert (heard, given, done, sum(counts.values())) == ([], reward, True, 0.0)


def test_a_call_that_is_not_closed_is_answered_with_what_is_wrong():
    turn = '<|python_tag|>calculator.call(expression="47*36"'
    [message], [(reward, done, counts)] = played([turn], "What is 47*36?", "1692")
    assert message["role"] == "tool" and message["content"].startswith("Error: ")
    assert (reward, done, counts["malformed_calls"]) == (0.0, False, 1.0)


def test_the_first_part_calls_always_and_the_second_part_mostly_guesses():
    calls = ["tool" in {m["role"] for m in one["messages"]} for one in calculator.conversations()]
    assert all(calls[: calculator.CALLS])
    second = calls[calculator.CALLS :]
    # Four standard deviations of a share of 0.25 of so many.
    assert sum(second) / len(second) == pytest.approx(0.25, abs=4 * (0.1875 / len(second)) ** 0.5)


def test_no_product_that_is_held_out_is_trained_on():
    known, held_out = calculator.products()
    assert len(held_out) == calculator.HELD_OUT and not set(known) & set(held_out)
    asked = {one["messages"][0]["content"] for one in calculator.conversations()}
    assert not asked & {calculator.question(*pair) for pair in held_out}


def test_both_kinds_of_conversations_fit_the_run(template):
    config = load_as(RunConfig, RUN, [])
    tokenizer = load_tokenizer("deploy/demo/model", chat_template=template)
    second = itertools.islice(calculator.conversations(), calculator.CALLS, calculator.CALLS + 200)
    for one in [*first(100), *second]:
        messages, tools = one["messages"], one["tools"]
        prompt = len(tokenizer.encode_chat(messages[:1], tools=tools))
        whole = len(tokenizer.encode_turns(messages, [len(messages) - 1], tools=tools).token_ids)
        assert prompt <= config.rollout.max_prompt_tokens
        assert whole - prompt <= config.rollout.max_completion_tokens


@pytest.mark.slow
def test_warm_start_and_run_can_start_on_what_is_written(written, template):
    settings = [f"data.train.source={written}/conversations.jsonl"]
    plan = plan_training(load_as(SftConfig, WARM_START, settings))
    assert f"{calculator.CALLS + calculator.MIXED:,} records" in plan.text
    assert "left out" not in plan.text
    settings = [f"data.{part}.source={written}/{part}.jsonl" for part in ("train", "eval")]
    config = load_as(RunConfig, RUN, [*settings, "model.path=deploy/demo/model"])
    model = config.model.model_copy(update={"chat_template": template})
    prepared = prepare(config.model_copy(update={"model": model}))
    assert prepared.held_out == (calculator.HELD_OUT,)
    assert "left out" not in prepared.text
