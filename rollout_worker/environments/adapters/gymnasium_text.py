"""Environments of gymnasium as conversations: observations become text, and text actions."""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollout_worker.environments.adapters.parameter_checks import (
    BadAdapter,
    Extract,
    NonEmpty,
    check_template,
    json_of,
    say,
)
from rollout_worker.environments.given_values import check_values
from rollout_worker.rewards.answers import answer_text
from rollout_worker.rewards.text_scorers import normalised
from services.user_code.import_path import nearest_hint

Message = dict[str, str]

_NUMBER = re.compile(r"[+-]?\d{1,18}")
_COLOURED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_SEEDS = 2**31
"""Some environments take no larger seed."""


class GymnasiumText:
    """An environment of gymnasium whose actions are `Discrete` or `Text`.

    A turn that is no action is answered with the actions that there are; `info` counts
    `invalid_actions` and `env_steps`, and has `terminated` and `truncated`. The calls of the
    environment run in threads.

    The seed of the episode goes to `env.reset`. An episode is the same for the same seed where the
    environment draws from its own `np_random` alone, as those of gymnasium do after their reset.
    What is drawn in a constructor is not seeded (FrozenLake with `desc: null`), and one whose spec
    says `nondeterministic` promises nothing: its completions may begin with different
    observations, which ends them with an error.
    """

    def __init__(
        self,
        env_id: NonEmpty,
        env_params: Mapping[str, Any] | None = None,
        *,
        actions: Mapping[str, int] | None = None,
        describe: NonEmpty = "{observation}",
        extract: Extract = "marker",
        most_invalid: Annotated[int, Field(ge=1)] = 3,
        invalid_reward: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0,
        system_prompt: NonEmpty | None = None,
    ):
        """Args:
        env_id: as of `gymnasium.make`, `FrozenLake-v1`; `package:Name-v0` imports the package.
        env_params: keyword arguments of `gymnasium.make`.
        actions: a word for each action of a `Discrete` space; None takes the numbers.
        describe: what the model reads of an observation: a template with {observation}, of which
            parts are {observation[0]}, and {render}, the text that the environment draws.
        extract: the action is the line after the last `####`, or the whole turn.
        most_invalid: the episode ends at so many turns without an action.
        invalid_reward: of a turn without an action.
        system_prompt: the first message; None sends none.

        Raises:
            BadScorer: if gymnasium cannot make it, or one of the others breaks a rule.
        """
        given = {"env_id": env_id, "env_params": env_params, "actions": actions}
        given |= {"describe": describe, "extract": extract, "most_invalid": most_invalid}
        given |= {"invalid_reward": invalid_reward, "system_prompt": system_prompt}
        check_values("", GymnasiumText.__init__, given)
        check_template("describe", describe, ("observation", "render"))
        self._env_id, self._describe, self._extract = env_id, describe, extract
        self._env_params = json_of("env_params", env_params)
        self._space = _checked_actions(env_id, self._env_params, describe)
        self._actions = _actions_by_word(actions, self._space)
        self._rule = _rule(self._space, actions, extract)
        self._most_invalid, self._invalid_reward = most_invalid, invalid_reward
        self._system = [] if system_prompt is None else say(system_prompt, "system")
        self._env: Any = None

    async def reset(self, item: dict[str, Any], seed: int) -> list[Message]:
        """Begins with the record's `question`, if it has one, the first observation and the
        actions.
        """
        self._invalid = 0
        first = await asyncio.to_thread(self._begin, seed % _SEEDS)
        asked = item.get("question")
        parts = [asked] if isinstance(asked, str) and asked else []
        return [*self._system, *say("\n\n".join([*parts, first, self._rule]))]

    async def step(
        self, message: Mapping[str, str]
    ) -> tuple[list[Message], float, bool, dict[str, float]]:
        """Takes the action of a turn, and answers with what is observed then."""
        text = message["content"]
        written = answer_text(text) if self._extract == "marker" else text.strip()
        action = None if written is None else self._action_of(written)
        if action is None:
            self._invalid += 1
            info = {"invalid_actions": 1.0, "env_steps": 0.0, "terminated": 0.0, "truncated": 0.0}
            found = "No action found" if written is None else f"{written[:80]!r} is no action"
            done = self._invalid >= self._most_invalid
            return say(f"{found}. {self._rule}"), self._invalid_reward, done, info
        described, reward, terminated, truncated = await asyncio.to_thread(self._act, action)
        info = {
            "invalid_actions": 0.0,
            "env_steps": 1.0,
            "terminated": float(terminated),
            "truncated": float(truncated),
        }
        return say(described), reward, terminated or truncated, info

    async def close(self) -> None:
        """Closes the environment."""
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    def _begin(self, seed: int) -> str:
        self._env = _make(self._env_id, self._env_params, self._describe)
        observation, _ = self._env.reset(seed=seed)
        return _described(self._env, observation, self._describe)

    def _act(self, action: Any) -> tuple[str, float, bool, bool]:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        described = _described(self._env, observation, self._describe)
        return described, float(reward), bool(terminated), bool(truncated)

    def _action_of(self, written: str) -> Any:
        """The action that is written; None where it is none."""
        if self._actions is not None:
            return self._actions.get(normalised(written))
        if _is_discrete(self._space):
            number = int(written) if _NUMBER.fullmatch(written) else None
            return number if number is not None and self._space.contains(number) else None
        return written if self._space.contains(written) else None


@functools.lru_cache(maxsize=16)
def _checked_actions(env_id: str, env_params: str, describe: str) -> Any:
    """The space of the actions, after one environment was made, reset and described."""
    env = _make(env_id, env_params, describe)
    try:
        observation, _ = env.reset(seed=0)
        try:
            _described(env, observation, describe)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            shown = str(_plain(observation))
            raise BadAdapter(
                f"{describe=} cannot be filled from the observation {shown:.200}: "
                f"{type(error).__name__}: {error}"
            ) from None
        space = env.action_space
    finally:
        env.close()
    if not _is_discrete(space) and type(space).__name__ != "Text":
        raise BadAdapter(
            f"{env_id=} has the action space {space}, which cannot be written as one word: only "
            "Discrete and Text can; wrap it in an environment of your own"
        )
    return space


def _make(env_id: str, env_params: str, describe: str) -> Any:
    """An environment, which draws text where `describe` shows it."""
    gymnasium = _gymnasium()
    params = json.loads(env_params)
    if "render_mode" in params:
        raise BadAdapter(
            "env_params.render_mode must be left out: {render} in describe asks for text"
        )
    draws = {"render_mode": "ansi"} if "{render" in describe else {}
    try:
        made = gymnasium.make(env_id, **params, **draws)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        hint = _param_hint(gymnasium, env_id, params) if isinstance(error, TypeError) else ""
        raise BadAdapter(
            f"gymnasium cannot make {env_id=} with env_params={params}: {error}{hint}"
        ) from error
    modes = made.metadata.get("render_modes", [])
    if draws and "ansi" not in modes:
        made.close()
        raise BadAdapter(
            f"{describe=} has {{render}}, but {env_id} draws no text: its render modes are "
            f"{', '.join(modes) or 'none'}"
        )
    return made


def _gymnasium() -> Any:
    try:
        import gymnasium  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise BadAdapter(
            f"GymnasiumText needs the package gymnasium, which does not import ({error}): "
            "pip install '.[gymnasium]'"
        ) from error
    return gymnasium


def _param_hint(gymnasium: Any, env_id: str, params: Mapping[str, Any]) -> str:
    """The known name nearest to one that the environment does not take."""
    made = gymnasium.spec(env_id.rpartition(":")[2]).entry_point
    if isinstance(made, str):
        made = gymnasium.envs.registration.load_env_creator(made)
    known = [name for name in inspect.signature(made).parameters if name != "render_mode"]
    wrong = next((name for name in params if name not in known), "")
    return f"{nearest_hint(wrong, known)}; it takes {', '.join(known) or 'none'}"


def _is_discrete(space: Any) -> bool:
    return type(space).__name__ == "Discrete"


def _actions_by_word(actions: Mapping[str, int] | None, space: Any) -> dict[str, int] | None:
    """The actions by their words, in the form in which words are compared."""
    if actions is None:
        return None
    if not _is_discrete(space):
        raise BadAdapter(f"actions must be left out: the action space is {space}, not Discrete")
    if not actions:
        raise BadAdapter(f"{actions=} must be a mapping such as {{'left': 0, 'right': 1}}")
    found: dict[str, int] = {}
    for word, action in actions.items():
        if not isinstance(word, str) or not word.strip() or len(word.splitlines()) > 1:
            raise BadAdapter(f"actions has the key {word!r}, which is no word: put it in quotes")
        is_number = isinstance(action, int) and not isinstance(action, bool)
        if not is_number or not space.contains(action):
            raise BadAdapter(f"actions.{word}={action!r:.80} must be an action of {_range(space)}")
        if normalised(word) in found:
            raise BadAdapter(f"actions has {word!r} twice; case and spaces do not count")
        found[normalised(word)] = action
    return found


def _range(space: Any) -> str:
    return f"{int(space.start)} to {int(space.start + space.n) - 1}"


def _rule(space: Any, actions: Mapping[str, int] | None, extract: Extract) -> str:
    """What the model reads about its actions."""
    if _is_discrete(space):
        names = _range(space) if actions is None else ", ".join(actions)
        how = "Write one after ####." if extract == "marker" else "Write one, and nothing else."
        return f"Actions: {names}. {how}"
    length = f"{space.min_length} to {space.max_length}"
    how = "after ####" if extract == "marker" else "and nothing else"
    letters = "".join(sorted(space.character_set))
    return f"Write a text of {length} of the characters {letters} {how}."


def _described(env: Any, observation: Any, describe: str) -> str:
    """An observation as the model reads it."""
    drawn = env.render() if "{render" in describe else ""
    text = drawn if isinstance(drawn, str) else drawn.getvalue()  # some return a StringIO
    return describe.format(observation=_plain(observation), render=_marked(text))


def _plain(value: Any) -> Any:
    """An observation in values of Python, floats with four significant digits."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if hasattr(value, "tolist"):  # an array or a number of numpy
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _marked(text: str) -> str:
    """A drawing for a terminal, in which what had a colour stands in a tag such as <red>S</red>."""

    def marked(found: re.Match) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        names = [_COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8]
        return f"<{names[0]}>{found[2]}</{names[0]}>" if names else found[2]

    return _ESCAPE.sub("", _COLOURED.sub(marked, text)).strip("\n")
