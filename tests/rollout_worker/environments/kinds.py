"""Environments of every kind, good and bad, that the tests of this folder name."""

import asyncio
import os
import pathlib
import random
import sys
import time
import types


def say(text):
    return [{"role": "user", "content": text}]


class Guessing:
    """Guess a number; answers higher or lower."""

    def __init__(self, most=8):
        self.most = most

    async def reset(self, item, seed):
        self.secret = item.get("secret", random.Random(seed).randint(1, self.most))
        self.turns = 0
        return say("Guess.")

    async def step(self, message):
        self.turns += 1
        text = message["content"].strip()
        guess = int(text) if text.isdecimal() else 0
        if guess == self.secret:
            return [], 1.0, True, {}
        return say("higher" if guess < self.secret else "lower"), 0.0, False, {}


class Recording(Guessing):
    """Writes which process answered what into a file, and whether it was closed."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def _write(self, what):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {what}\n")

    async def reset(self, item, seed):
        self._write("reset")
        return await super().reset(item, seed)

    async def step(self, message):
        self._write(message["content"])
        if message["content"] == "die":
            os._exit(3)
        if message["content"] == "wait":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self._write("cancelled")
                raise
        return await super().step(message)

    def close(self):
        self._write("close")


class Bad:
    """Does what the item says."""

    async def reset(self, item, seed):
        self.does = item["does"]
        if self.does == "reset raises":
            raise ValueError("no game today")
        if self.does == "reset returns a text":
            return "Guess."
        return say("Guess.")

    async def step(self, message):
        return await getattr(self, self.does.replace(" ", "_"))()

    async def raises(self):
        raise ValueError("the table fell over")

    async def exits(self):
        sys.exit(4)

    async def dies(self):
        os.kill(os.getpid(), 9)

    async def returns_a_text(self):
        return "higher"

    async def observation_is_a_text(self):
        return "higher", 0.0, False, {}

    async def observation_is_empty(self):
        return [], 0.0, False, {}

    async def speaks_for_the_model(self):
        return [{"role": "assistant", "content": "4"}], 0.0, False, {}

    async def reward_is_nan(self):
        return say("higher"), float("nan"), False, {}

    async def reward_is_none(self):
        return say("higher"), None, False, {}

    async def reward_is_huge(self):
        return say("higher"), 1e300, True, {}

    async def done_is_a_text(self):
        return say("higher"), 0.0, "no", {}

    async def waits(self):
        await asyncio.sleep(1000)

    async def blocks(self):
        time.sleep(1000)

    async def says_10_mb(self):
        return say("x" * 10_000_000), 0.0, False, {}

    async def says_1_mb_of_chinese(self):
        return say("\u4f60" * 349_000), 0.0, False, {}

    async def takes_memory(self):
        return say(str(len(bytearray(8 * 2**30)))), 0.0, False, {}

    async def half_a_surrogate(self):
        return say("\ud800"), 0.0, False, {}

    async def prints_much(self):
        for _ in range(100):
            print("x" * 99_999)
        return [], 1.0, True, {}

    async def forks(self):
        if os.fork() == 0:
            return say("from the copy"), 0.0, False, {}
        return [], 1.0, True, {}

    async def counts(self):
        return say("higher"), 0.0, False, {"calls": 2, "share": 0.5, "what": "text"}

    async def an_object(self):
        return types.SimpleNamespace(observation=say("higher"), reward=0.5, done=False, info=None)


class Unsteady(Recording):
    """Answers otherwise when it is played again."""

    async def step(self, message):
        await super().step(message)
        return say(f"{time.time_ns()}"), 0.0, False, {}


class NoStep:
    async def reset(self, item, seed):
        return say("Guess.")


class ExitsAtClose(Guessing):
    def close(self):
        sys.exit(7)


class NeverCloses(Guessing):
    async def close(self):
        await asyncio.sleep(1000)


class BlocksAtClose(Guessing):
    """Once it has played, its end keeps the process for ever."""

    def close(self):
        if hasattr(self, "secret"):
            time.sleep(1000)


class NoSeed(Guessing):
    async def reset(self, item):
        return say("Guess.")


class TwoMessages(Guessing):
    async def step(self, message, last):
        return [], 0.0, True, {}


class PlainStep(NoStep):
    def step(self, message):
        return [], 0.0, True, {}


NOT_A_CLASS = 3


class Dialog:
    """Answers with a text that depends on seed and turns, for a number of turns from the seed."""

    def __init__(self, pause_s=0.0, die_at=0, mark=""):
        self.pause_s = pause_s
        self.die_at = die_at
        self.mark = mark

    async def reset(self, item, seed):
        self.random = random.Random(seed)
        self.turns = 0
        return [{"role": "system", "content": "Count."}, *say(f"{self.random.randint(10, 99)} + 1")]

    async def step(self, message):
        self.turns += 1
        await asyncio.sleep(self.pause_s * self.random.random())
        if self.turns == self.die_at and not os.path.exists(self.mark):
            with open(self.mark, "w"):
                os._exit(5)
        reward = len(message["content"]) % 5 / 4
        if self.random.random() < 0.2:
            return [], reward, True, {}
        return say(f"then {self.random.randint(0, 9)}"), reward, False, {}


class Stuck(Dialog):
    """Never answers some of the first turns."""

    async def step(self, message):
        if self.turns == 0 and len(message["content"]) % 4 == 0:
            await asyncio.sleep(1000)
        return await super().step(message)


class Held(Dialog):
    """Waits in mid-episode as long as a file is there, and says in another which process waits."""

    def __init__(self, folder):
        super().__init__()
        self.folder = pathlib.Path(folder)

    async def step(self, message):
        answer = await super().step(message)
        if self.turns == 2 and (self.folder / "hold").exists():
            with (self.folder / "held").open("a") as file:
                file.write(f"{os.getpid()}\n")
            while (self.folder / "hold").exists():
                await asyncio.sleep(0.02)
        return answer
