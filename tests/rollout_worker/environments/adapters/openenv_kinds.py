"""An environment of OpenEnv, as its authors write it, and a server of it in this process."""

import contextlib
import random
import socket
import threading

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from tests.deadlines import HANG_S, wait_until


class Guess(Action):
    """A number."""

    guess: int
    note: str = ""


class Answer(Observation):
    """What the model reads."""

    text: str
    guesses: list[int]


class GuessingServer(Environment):
    """Higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.guesses = []

    def reset(self, seed=None, episode_id=None, secret=None):
        self.secret = random.Random(seed).randint(1, 99) if secret is None else secret
        self.guesses = []
        return Answer(text="Guess.", guesses=[])

    def step(self, action):
        if action.note == "fail":
            raise LookupError("the table fell over")
        self.guesses.append(action.guess)
        if action.guess == self.secret:
            return Answer(text="right", guesses=self.guesses, reward=1.0, done=True)
        text = "higher" if action.guess < self.secret else "lower"
        return Answer(text=text, guesses=self.guesses, reward=-0.25)

    @property
    def state(self):
        return State(step_count=len(self.guesses))


@contextlib.contextmanager
def serving(most_sessions=50):
    """The address of a server on loopback."""
    app = create_fastapi_app(GuessingServer, Guess, Answer, max_concurrent_envs=most_sessions)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the server to start")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(HANG_S)
