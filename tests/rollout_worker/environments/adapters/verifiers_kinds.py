"""Environments of verifiers as their authors write them: classes that answer, with a rubric."""

import verifiers.legacy as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "Guess 1 to 9.", "answer": "7"}])


class Guessing(vf.MultiTurnEnv):
    """Higher or lower."""

    async def setup_state(self, state):
        state["guesses"] = []

    @vf.stop
    async def found(self, state):
        return bool(state["guesses"]) and state["guesses"][-1] == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == "raise":
            raise vf.ToolCallError() from LookupError("the table fell over")
        if messages[-1].content == "give up":
            state["final_env_response"] = [vf.UserMessage(content="It was 7.")]
            return []
        return [vf.UserMessage(content="higher" if messages[-1].content < "7" else "lower")]

    async def add_trajectory_step(self, state, trajectory_step):
        await super().add_trajectory_step(state, trajectory_step)
        state["guesses"].append(trajectory_step["completion"][-1].content)


class Forgetful(Guessing):
    """Shows the model only the last turn."""

    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


async def right(completion, answer):
    """1 for the number."""
    return float(completion[-1].content == answer)


async def length(state):
    """Of the conversation."""
    return len(state["completion"])


async def best(completions):
    """Compares a group."""
    return [1.0 for _ in completions]


def guessing(kind="Guessing", system_prompt=None, group=False):
    """An environment of this file, as `load_environment` of a package returns one."""
    rubric = vf.Rubric([best] if group else [right, length], [1.0] if group else [1.0, 0.0])
    made = {"Guessing": Guessing, "Forgetful": Forgetful}[kind]
    return made(dataset=ROWS, rubric=rubric, system_prompt=system_prompt, max_turns=4)


def price(item: str, count: int = 1) -> int:
    """Looks up what some pieces of an item cost.

    Args:
        item: Its name.
        count: How many pieces.
    """
    return count * {"tea": 3, "milk": 1}[item]


def shop():
    """Tools, and an answer that contains the right one."""

    async def answered(completion, answer):
        return float(answer in completion[-1].content)

    return vf.ToolEnv(tools=[price], dataset=ROWS, rubric=vf.Rubric([answered]), max_turns=5)
