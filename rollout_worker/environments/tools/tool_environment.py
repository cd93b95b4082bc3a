"""A ready environment: the model calls tools, and its first turn without a call is the answer."""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.chat_rows import read_row
from rollout_worker.environments.given_values import check_values
from rollout_worker.environments.tools.built_in_tools import load_tool
from rollout_worker.environments.tools.function_schemas import BadTool
from rollout_worker.environments.tools.tool_calls import (
    MOST_CALLS,
    BadCall,
    CallFormat,
    CallReader,
)
from rollout_worker.environments.tools.toolbox import Toolbox
from rollout_worker.rewards.processes.loaded_scorer import LoadedScorer
from rollout_worker.rewards.scorers import BUILT_INS, BadScorer

Message = dict[str, Any]


class ToolEnvironment:
    """Answers calls with messages of the role `tool`, and scores the turn that calls nothing.

    What is wrong with a call is its answer: it names no tool, has no right arguments, is no JSON,
    or its tool raised. `info` counts `tool_calls`, `malformed_calls` and `failed_calls`.
    """

    def __init__(
        self,
        tools: Sequence[str | Mapping[str, Any]],
        *,
        scorer: str = "gsm8k_answer",
        scorer_params: Mapping[str, Any] | None = None,
        call_format: CallFormat = "hermes",
        system_prompt: str | None = None,
        question: str | None = None,
        answer: str | None = None,
        calls_per_turn: Annotated[int, Field(ge=1, le=MOST_CALLS)] = 8,
        result_chars: Annotated[int, Field(ge=1)] = 4000,
    ):
        """Args:
        tools: each `calculator`, `python`, `search`, an import path `package.module:function`, a
            function of a file, `my_pkg/tools.py:function`, or a mapping with such a `name` and the
            parameters of a built-in one.
        scorer: of the answer, a name as in `reward.functions`; one that judges single completions.
        scorer_params: its keyword arguments.
        call_format: in which the model writes calls, `hermes` or `llama`.
        system_prompt: the first message, unless the record has one; None sends none.
        question, answer: fields of the record; None takes those that a data source takes.
        calls_per_turn: further calls of a turn are not run.
        result_chars: of what a call returns; the rest is cut off.

        Raises:
            BadTool, BadScorer: if a tool or the scorer cannot be used.
        """
        if isinstance(tools, str | Mapping) or not tools:
            raise BadTool(f"tools must be a list with the name of a tool, got {tools!r:.80}")
        given = {"scorer": scorer, "scorer_params": scorer_params, "call_format": call_format}
        given |= {"system_prompt": system_prompt, "question": question, "answer": answer}
        given |= {"calls_per_turn": calls_per_turn, "result_chars": result_chars}
        check_values("", ToolEnvironment.__init__, given)
        self._toolbox, self._reader = _loaded_tools(json.dumps(list(tools)), call_format)
        self._scorer = _loaded_scorer(scorer, json.dumps(dict(scorer_params or {})))
        self.tools = self._toolbox.schemas
        self._system = [] if system_prompt is None else [_message("system", system_prompt)]
        self._source = SourceConfig(
            source="records.jsonl", question_field=question, answer_field=answer
        )
        self._calls_per_turn, self._result_chars = calls_per_turn, result_chars

    async def reset(self, item: dict[str, Any], seed: int) -> list[Message]:
        """Begins with the question of the record."""
        try:
            self._row = read_row(item, item, self._source)
        except ValueError as error:
            raise ValueError(f"the record {error} (here params.question, params.answer)") from None
        self._item = item
        if (check := BUILT_INS.get(self._scorer.name)) and check.check_gold:
            check.check_gold(self._row.answer, item, self._scorer.params)
        asked = self._row.messages or (_message("user", self._row.question),)
        return [*([] if self._row.has_system else self._system), *asked]

    async def step(
        self, message: Mapping[str, str]
    ) -> tuple[list[Message], float, bool, dict[str, float]]:
        """Runs the calls of a turn; without any the episode ends with the score of the turn."""
        calls = self._reader.read(message["content"])
        counts = {"tool_calls": 0.0, "malformed_calls": 0.0, "failed_calls": 0.0}
        if not calls:
            return [], await self._score(message["content"]), True, counts
        answers = []
        for place, call in enumerate(calls):
            if place >= self._calls_per_turn:
                text = f"Error: not run, a turn has at most {self._calls_per_turn} calls"
            elif isinstance(call, BadCall):
                counts["malformed_calls"] += 1
                text = f"Error: {call.problem}"
            else:
                counts["tool_calls"] += 1
                text, failed = await self._toolbox.run(call)
                counts["failed_calls"] += failed
                text = f"Error: {text}" if failed else text
            answers.append(_message("tool", self._cut(text)))
        return answers, 0.0, False, counts

    def _cut(self, text: str) -> str:
        left_out = len(text) - self._result_chars
        return text if left_out <= 0 else f"{text[:-left_out]}... ({left_out} characters cut)"

    async def _score(self, text: str) -> float:
        request = {
            "completions": [text],
            "answer": self._row.answer,
            "prompt": self._row.question,
            "item": self._item,
        }
        line = json.dumps(request).encode()
        if self._scorer.kind.is_async:
            found = await self._scorer.score_async(line)
        else:
            found = await asyncio.to_thread(self._scorer.score, line)
        return found["rewards"][0][self._scorer.name]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@functools.lru_cache(maxsize=16)
def _loaded_tools(tools: str, call_format: CallFormat) -> tuple[Toolbox, CallReader]:
    """Tools, given as JSON, for all episodes of a process."""
    toolbox = Toolbox([load_tool(one) for one in json.loads(tools)])
    return toolbox, CallReader(toolbox.schemas, call_format)


@functools.lru_cache(maxsize=16)
def _loaded_scorer(name: str, params: str) -> LoadedScorer:
    """The same for a scorer."""
    scorer = LoadedScorer.load(name, json.loads(params))
    if scorer.kind.is_group:
        raise BadScorer(
            f"scorer {name!r} compares the completions of a group, of which an environment sees one"
        )
    if name in BUILT_INS and BUILT_INS[name].spends:
        raise BadScorer(f"scorer {name!r} spends of reward.budget, which no environment may")
    return scorer
