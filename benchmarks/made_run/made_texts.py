"""Texts of a made-up run: questions, completions, their tokens and rewards."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.made_run.made_steps import RunPlan

HOSTILE = (
    "<script>window.attacked = true</script>",
    '</script><img src=x onerror="window.attacked = true">',
    "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "\u202egnp.exe\u202c \u0000 \u2028 \ufeff {{7*7}} ${7*7}",
    "javascript:alert(1)//\"'><svg onload=window.attacked=true>",
)
LONG_CHARS = 100_000


def samples(plan: RunPlan, step: int, accuracy: float) -> Iterator[dict[str, Any]]:
    """The first few completions of a step."""
    rng = np.random.default_rng([plan.seed, step, 7])
    workers = plan.names(step)[1:]
    for index in range(plan.samples_per_step):
        prompt_id = int(rng.integers(0, 64))
        record = _completion(rng, prompt_id, accuracy)
        why = "first"
        if rng.random() < 0.02:
            record, why = _disagree(record), "disagreement"
        elif rng.random() < 0.01:
            record, why = _fail(record), "reward_error"
        if plan.hostile and index == 0:
            record = _attack(record, step)
        text = record["completion"]
        more: dict[str, Any] = {
            "group_id": f"g{step * 16 + index:08d}",
            "policy_version": max(0, step - 1 - plan.max_staleness),
            "worker": workers[index % len(workers)],
            "sample_index": index,
            "why": why,
            "prompt": f"<|user|>{record['question']}<|assistant|>",
        }
        if plan.tokens:
            more |= _tokens(rng, text)
        yield {"step": step, **record, **more}


def evaluation(plan: RunPlan, step: int, accuracy: float, items: int = 200) -> Iterator[dict]:
    """Held-out completions: the same prompts at every evaluation."""
    rng = np.random.default_rng([plan.seed, step, 11])
    for prompt_id in range(items):
        record = _completion(rng, prompt_id, accuracy)
        yield {"step": step, "sample_index": 0, "policy_version": step, **record}


def _completion(rng: np.random.Generator, prompt_id: int, accuracy: float) -> dict[str, Any]:
    terms = np.random.default_rng([prompt_id]).integers(1, 10, 4)
    question = (
        "State the final answer to the following arithmetic problem: "
        f"{' + '.join(map(str, terms))} ="
    )
    right = bool(rng.random() < accuracy)
    total = int(terms[0])
    lines = []
    for term in terms[1:]:
        lines.append(f"{total} + {term} = {total + int(term)}")
        total += int(term)
    said = total if right else total + int(rng.integers(1, 5))
    text = "\n".join([*lines, f"#### {said}"]) if rng.random() < 0.5 + accuracy / 2 else ""
    text = text or f"#### {said}"
    cut = bool(rng.random() < 0.01)
    reward = float(right and not cut)
    return {
        "prompt_id": prompt_id,
        "question": question,
        "answer": str(total),
        "completion": text[:-5] if cut else text,
        "completion_tokens": len(re.findall(r"\S+\s*", text)),
        "finish_reason": "length" if cut else "stop",
        "rewards": dict.fromkeys(
            ("gsm8k_answer", "gsm8k_answer/strict", "gsm8k_answer/lenient"), reward
        ),
        "total_reward": reward,
        "reward_error": "",
        "parsed": {"strict": None if cut else str(said), "lenient": str(said)},
        "notes": {"judge": f"The sum is {total}.\nGrade: {10 * reward:g}"},
    }


def _disagree(record: dict[str, Any]) -> dict[str, Any]:
    """The lenient parser finds the answer, the strict one does not."""
    rewards = {"gsm8k_answer": 0.0, "gsm8k_answer/strict": 0.0, "gsm8k_answer/lenient": 1.0}
    parsed = {"strict": None, "lenient": record["answer"]}
    text = f"The answer is {record['answer']}."
    change = {"rewards": rewards, "parsed": parsed, "completion": text, "total_reward": 0.0}
    return record | change


def _fail(record: dict[str, Any]) -> dict[str, Any]:
    error = "gsm8k_answer: timed out after 5.0 s"
    return record | {"reward_error": error, "rewards": {}, "total_reward": 0.0}


def _attack(record: dict[str, Any], step: int) -> dict[str, Any]:
    """Text of the kind that breaks pages; every fifth one is very long."""
    text = HOSTILE[step % len(HOSTILE)]
    long = text + "x" * LONG_CHARS if step % 5 == 0 else text
    return record | {"question": text, "answer": text, "completion": long}


def _tokens(rng: np.random.Generator, text: str, limit: int = 2048) -> dict[str, Any]:
    pieces = [*re.findall(r"\S{1,12}|\s+", text), "<|im_end|>"]
    logprobs = (-rng.exponential(0.2, len(pieces))).round(5).tolist()
    tokens = [list(pair) for pair in zip(pieces, logprobs, strict=True)]
    cut = {"tokens_cut": len(tokens) - limit} if len(tokens) > limit else {}
    return {"tokens": tokens[:limit], **cut}
