"""Agents of every kind, good and bad, that the tests of this folder name."""

import asyncio
import contextlib
import json
import os
import random
import sys


def user(text):
    return {"role": "user", "content": text}


def said(turn):
    return {"role": "assistant", "content": turn.text}


async def revises(policy, item, tries=2, log=""):
    """Asks again; its reward is the number of tries that it took. Notes all that it was given."""
    messages = [{"role": "system", "content": "Count."}, user(f"{policy.seed % 90 + 10} + 1")]
    turns = []
    for left in reversed(range(tries)):
        turn = await policy.generate(messages, max_tokens=9 + left)
        turns.append(turn._asdict())
        messages += [said(turn), user(f"then {left}")]
    if log:
        with open(log, "a") as file:
            file.write(json.dumps(turns) + "\n")
    return len(turns), {"tries": len(turns)}


async def by_ids(policy, item, log=""):
    """Goes on with token ids that no template has written."""
    ids, turns = [5, 6, 7], []
    for _ in range(3):
        turn = await policy.generate(ids, max_tokens=6)
        turns.append(turn._asdict())
        ids = [*turn.prompt_token_ids, *turn.token_ids, 8, 9]
    with open(log, "a") as file:
        file.write(json.dumps(turns) + "\n")
    return random.Random(policy.seed).random()


async def by_openai(policy, item, log="", says=1.0):
    """An agent of OpenAI's client, which asks for the tokens too."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    messages, turns = [user(f"{policy.seed % 90 + 10} + 1")], []
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="policy",
            messages=messages,
            max_tokens=6,
            temperature=says,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        [choice] = answer.choices
        turns.append(
            {
                "prompt_token_ids": answer.prompt_token_ids,
                "token_ids": choice.token_ids,
                "logprobs": [one.logprob for one in choice.logprobs.content],
            }
        )
        messages += [choice.message, user("then 1")]
    with open(log, "a") as file:
        file.write(json.dumps(turns) + "\n")
    return random.Random(policy.seed).random()


async def dies_once(policy, item, mark):
    first = await policy.generate([user("Guess.")])
    if not os.path.exists(mark):
        with open(mark, "w"):
            os._exit(5)
    await policy.generate([user("Guess."), said(first), user("Sure?")])
    return 1.0


async def bad(policy, item):
    """Does what the item says."""
    return await DOES[item["does"]](policy)


async def never_asks(policy):
    return 1.0


async def asks_twice_at_once(policy):
    await asyncio.gather(*[policy.generate(GUESS) for _ in range(2)])


async def changes_the_past(policy):
    first = await policy.generate(GUESS)
    await policy.generate([user("Guess!"), said(first), user("Sure?")])


async def changes_what_was_said(policy):
    await policy.generate(GUESS)
    await policy.generate([*GUESS, {"role": "assistant", "content": "another"}, user("Sure?")])


async def asks_again(policy):
    await policy.generate(GUESS)
    await policy.generate(GUESS)


async def says_nothing(policy):
    first = await policy.generate(GUESS)
    await policy.generate([*GUESS, said(first)])


async def turns_to_token_ids(policy):
    first = await policy.generate(GUESS)
    await policy.generate([*first.prompt_token_ids, *first.token_ids, 5])


async def drops_token_ids(policy):
    first = await policy.generate([5, 6])
    await policy.generate([*first.token_ids, 5])


async def gives_up(policy):
    first = await policy.generate(GUESS)
    asking = asyncio.create_task(policy.generate([*GUESS, said(first), user("Sure?")]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await policy.generate([*GUESS, said(first), user("Sure?"), user("Really?")])


async def speaks_for_the_model_later(policy):
    first = await policy.generate(GUESS)
    await policy.generate([*GUESS, said(first), user("Sure?"), said(first)])


async def corrects_itself(policy):
    """What was refused is not said."""
    for messages, changes in (([5, -1], {}), (GUESS, {"max_tokens": 0})):
        with contextlib.suppress(ValueError):
            await policy.generate(messages, **changes)
    await policy.generate(GUESS)
    return 0.5, {"turns": 1}


async def shows_a_call(policy, other=None):
    """Begins with a call of a tool that the model did not make."""
    call = {"function": {"name": "price", "arguments": {"item": "tea"}}}
    shown = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [user("Tea?"), shown, {"role": "tool", "content": "3"}]
    first = await policy.generate(messages)
    messages[1] = other or shown
    await policy.generate([*messages, said(first), user("Sure?")])


async def changes_a_call(policy):
    call = {"function": {"name": "price", "arguments": {"item": "milk"}}}
    await shows_a_call(policy, {"role": "assistant", "content": None, "tool_calls": [call]})


async def raises(policy):
    await policy.generate(GUESS)
    raise ValueError("the table fell over")


async def exits(policy):
    await policy.generate(GUESS)
    sys.exit(4)


async def reads_its_address_in_a_thread(policy):
    await asyncio.to_thread(lambda: policy.base_url)


async def is_interrupted(policy):
    await policy.generate(GUESS)
    raise KeyboardInterrupt


def asks(messages, **changes):
    async def run(policy):
        await policy.generate(messages, **changes)

    return run


def returns(value):
    async def run(policy):
        await policy.generate(GUESS)
        return value

    return run


GUESS = [user("Guess.")]


async def tells_what_it_read(policy):
    first = await policy.generate(GUESS)
    second = await policy.generate([*GUESS, said(first), user("Sure?")])
    read = second.prompt_token_ids
    return 1.0, {f"token {place}": token for place, token in enumerate(read)}


DOES = {
    "tells what it read": tells_what_it_read,
    "never asks": never_asks,
    "asks nothing": asks([]),
    "asks a text": asks("Guess."),
    "asks for no tokens": asks(GUESS, max_tokens=0),
    "asks for the model": asks([{"role": "assistant", "content": "4"}]),
    "asks for half a token": asks([5, 1.5]),
    "asks for a token below 0": asks([5, -1]),
    "asks for a token beyond all": asks([5, 2**31]),
    "asks for a million tokens": asks([5] * 1_000_000),
    "asks for all there is": asks(GUESS, max_tokens=sys.maxsize),
    "asks twice at once": asks_twice_at_once,
    "changes the past": changes_the_past,
    "changes what was said": changes_what_was_said,
    "asks again": asks_again,
    "says nothing": says_nothing,
    "turns to token ids": turns_to_token_ids,
    "drops token ids": drops_token_ids,
    "gives up": gives_up,
    "speaks for the model later": speaks_for_the_model_later,
    "corrects itself": corrects_itself,
    "shows a call": shows_a_call,
    "changes a call": changes_a_call,
    "raises": raises,
    "exits": exits,
    "is interrupted": is_interrupted,
    "reads its address in a thread": reads_its_address_in_a_thread,
    "returns a text": returns("won"),
    "returns a nan": returns(float("nan")),
    "returns nothing": returns(None),
    "ends well": returns((0.5, {"turns": 1})),
}


def plain(policy, item):
    return 1.0


async def lacks_the_item(policy):
    return 1.0


async def pays(policy, item):
    return len(policy.tools)


def price(item: str) -> int:
    """Looks up a price.

    Args:
        item: Its name.
    """
    return len(item)


pays.tools = [price]


async def miscalls(policy, item):
    return 1.0


miscalls.call_format = "hermess"
