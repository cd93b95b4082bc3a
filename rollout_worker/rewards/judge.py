"""The built-in async scorer that asks a model behind an OpenAI-compatible endpoint for a grade."""

import asyncio
import functools
import os
import random
import re
import typing
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rollout_worker.rewards.spending import METER, Spending

if typing.TYPE_CHECKING:
    import httpx

TEMPLATE = """\
Grade the answer to a question from 0 to 10. 10 is correct and complete, 0 is wrong.

Question:
{prompt}

Reference answer:
{answer}

Answer to grade:
{completion}

Write your grade as the last line, in the form `Grade: 7`."""
VERDICT = r"[Gg]rade\W{0,6}(\d+(?:\.\d+)?)"
_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 30.0
_END_OF_THOUGHT = "</think>"
_SIGN = re.compile(r"(?<![A-Za-z])[-\u2212]\Z")
_GOES_ON = re.compile(r"\d|[.,]\d|[eE][-+]?\d|[-\u2013\u2014]\d|\s+to\s+\d")
"""What makes another number, or a range, of the digits before."""
_SCALE = re.compile(r"[\s*_`]*(?:(?:/|out of)\s*(\d+(?:\.\d+)?)|%)")
_OTHER_PLACES = re.compile(
    r"(?<![\w\\}])\{\s*(question|response|output|reference|solution|gold|ground_truth|item|input"
    r"|(?i:prompt|answer|completion))\s*\}"
)
"""What is meant as one of `_PLACES`, and is none."""
_PLACES = re.compile(r"\{(prompt|answer|completion)\}")


async def judge(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    url: str,
    model: str,
    template: str = TEMPLATE,
    verdict: str = VERDICT,
    highest: float = 10.0,
    max_tokens: int = 256,
    tries: int = 4,
    key_from: str | None = None,
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
) -> dict[str, float | str]:
    """Scores the grade that a judge gives, as a share of the highest.

    Asked again after 429, 5xx and lost connections, with growing pauses, or those of the answer's
    `Retry-After`; all within `reward.timeout_s`. What is no grade is an error. Each request counts
    for `reward.budget`, with the tokens that the endpoint says it has used.

    Args:
        completion: stands for `{completion}` in the template.
        answer: stands for `{answer}`.
        prompt: stands for `{prompt}`.
        item: not used.
        url: of the API, such as `http://127.0.0.1:8000/v1`.
        model: its name there.
        template: the message to the judge.
        verdict: regular expression whose group is the grade; the last place where it is found
            counts, after `</think>` where there is one. A sign, a range, another scale (`7/100`)
            and an answer that was cut off at max_tokens are errors.
        highest: grade of a reward of 1.
        max_tokens: of the judge's answer.
        tries: requests for one completion at most.
        key_from: name of the environment variable with the API's key; `reward.environment`
            must name it too.
        prompt_price: of a million prompt tokens, in any currency.
        completion_price: of a million tokens of the judge's answer.

    Returns:
        `value`, and the judge's answer as `note`.

    Raises:
        ValueError: if the endpoint refuses or fails, or its answer has no grade from 0 to highest.
    """
    given = {"prompt": prompt, "answer": answer, "completion": completion}
    text = _PLACES.sub(lambda place: given[place[1]], template)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {os.environ[key_from]}"} if key_from else {}
    reply = await _post(f"{url.rstrip('/')}/chat/completions", body, headers, tries)
    usage = _used_tokens(reply)
    prices = (prompt_price, completion_price)
    cost = sum(tokens * price / 1e6 for tokens, price in zip(usage, prices, strict=True))
    METER.add_spending(Spending(prompt_tokens=usage[0], completion_tokens=usage[1], cost=cost))
    try:
        said = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"the judge's reply is no chat completion: {str(reply)[:120]!r}") from None
    if reply["choices"][0].get("finish_reason") == "length":
        raise ValueError(f"the judge's answer ends at max_tokens={max_tokens}: raise it")
    return {"value": _grade(said, verdict, highest), "note": said}


def _used_tokens(reply: Any) -> tuple[int, int]:
    """Tokens of prompt and completion, as far as the reply says."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    counts = [
        usage.get(name) if isinstance(usage, dict) else None
        for name in ("prompt_tokens", "completion_tokens")
    ]
    prompt, completion = (one if type(one) is int and 0 < one < 10**12 else 0 for one in counts)
    return prompt, completion


def _grade(said: Any, verdict: str, highest: float) -> float:
    """The last grade in what the judge said after its thoughts, as a share of the highest."""
    text = said.rpartition(_END_OF_THOUGHT)[2] if isinstance(said, str) else ""
    found = [one for one in re.finditer(verdict, text) if one[1]]
    if not found:
        raise ValueError(f"the judge gives no grade that {verdict!r} finds: {str(said)[-120:]!r}")
    start, end = found[-1].span(1)
    shown = text[max(0, start - 12) : end + 12]
    try:
        grade = float(text[start:end])
    except ValueError:
        raise ValueError(
            f"the judge's grade {text[start:end]!r}, as {verdict!r} finds it, is no number: "
            "correct verdict"
        ) from None
    scale = _SCALE.match(text, end)
    of_another = scale is not None and float(scale[1] or 100) != highest
    if of_another or _SIGN.search(text[:start]) or _GOES_ON.match(text, end):
        raise ValueError(
            f"the judge's grade in {shown!r} is no plain number from 0 to {highest:g}: have the "
            "template ask for one"
        )
    if not 0 <= grade <= highest:
        raise ValueError(f"the judge's grade must lie between 0 and {highest:g}, got {grade:g}")
    return grade / highest


async def _post(url: str, body: dict, headers: dict[str, str], tries: int) -> Any:
    """The decoded reply."""
    import httpx

    problem = ""
    for number in range(tries):
        pause_s = _FIRST_PAUSE_S * 2**number * (0.5 + random.random())
        METER.add_spending(Spending(requests=1))
        answered = False
        try:
            reply = await _client().post(url, json=body, headers=headers)
            answered = reply.status_code == 200
        except httpx.TransportError as error:
            if number + 1 == tries:
                raise ValueError(f"the judge cannot be asked: {error!r}, {tries} tries") from error
        else:
            if reply.status_code == 200:
                try:
                    return reply.json()
                except ValueError:
                    text = reply.text[:120]
                    raise ValueError(f"the judge's reply is no JSON: {text!r}") from None
            problem = f"the judge answers {reply.status_code}: {_gist(reply)!r}"
            if reply.status_code != 429 and reply.status_code < 500:
                raise ValueError(problem)
            pause_s = _asked_pause(reply.headers.get("Retry-After", "")) or pause_s
        finally:  # also where the time limit cancels it
            METER.add_spending(Spending(failed_requests=int(not answered)))
        if number + 1 < tries:
            await asyncio.sleep(min(pause_s, _MOST_PAUSE_S))
    raise ValueError(f"{problem}, {tries} tries")


def _gist(reply: "httpx.Response") -> str:
    """Where a reply leads elsewhere, the address, else how it begins."""
    return (reply.headers.get("Location") or reply.text)[:120]


def _asked_pause(text: str) -> float | None:
    """Seconds of a `Retry-After`; None for a date, or without one."""
    return float(text) if re.fullmatch(r"\d{1,6}(?:\.\d{1,3})?", text) else None


@functools.cache
def _client() -> "httpx.AsyncClient":
    # Loading the library takes time that only this scorer should cost.
    import httpx

    # How many calls there are, and how long they take, is bounded by those who call the scorer.
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


def check_judge(params: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters with which the judge cannot be asked."""
    _check_url(params.get("url", "http://x"))
    model, template = params.get("model", "x"), params.get("template", TEMPLATE)
    if not isinstance(model, str) or not model.strip():
        raise ValueError(f"model={model!r} must be the name that the endpoint has for it")
    if not isinstance(template, str) or "{completion}" not in template:
        raise ValueError(f"template={template!r} must contain {{completion}}")
    wrong = [one[0] for one in _OTHER_PLACES.finditer(template) if not _PLACES.fullmatch(one[0])]
    if wrong:
        raise ValueError(
            f"template has {wrong[0]}, which is filled with nothing: its places are {{prompt}}, "
            "{answer} and {completion}"
        )
    verdict = params.get("verdict", VERDICT)
    try:
        groups = re.compile(verdict).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"verdict={verdict!r} is not a regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"verdict={verdict!r} must have one group, the grade; it has {groups}")
    for name in ("highest", "tries", "max_tokens"):
        value = params.get(name, 1)
        whole = name == "highest" or isinstance(value, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or not whole or value <= 0:
            raise ValueError(f"{name}={value!r} must be a positive number")
    _check_prices(params)
    key_from = params.get("key_from")
    if key_from is not None and key_from not in os.environ:
        raise ValueError(
            f"key_from={key_from!r} names no environment variable that scorers have: set it, "
            "and name it in reward.environment"
        )
    if key_from is not None and not re.fullmatch("[!-~]+", os.environ[key_from]):
        raise ValueError(
            f"key_from={key_from!r}: the variable is empty, or has white space (such as a newline "
            "at its end) or characters beyond ASCII, which a key has not: set it to the key alone"
        )


def _check_prices(params: Mapping[str, Any]) -> None:
    for name in ("prompt_price", "completion_price"):
        price = params.get(name, 0.0)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e9:
            raise ValueError(f"{name}={price!r} must be the price of a million tokens, 0 or more")


def _check_url(url: Any) -> None:
    if not isinstance(url, str) or not re.match(r"https?://", url):
        raise ValueError(f"url={url!r} must begin with http:// or https://")
    try:
        parts = urllib.parse.urlsplit(url)
        found = parts.hostname is not None and parts.port != 0 and re.fullmatch("[!-~]+", url)
    except ValueError as error:
        raise ValueError(f"url={url!r} is no address: {error}") from None
    if "@" in parts.netloc:
        raise ValueError("url holds a user's name or password: give a key with key_from instead")
    if not found:
        raise ValueError(f"url={url!r} must have a host, a port if any, and no white space")
    if "?" in url or "#" in url or url.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"url={url!r} must end before /chat/completions, which is added to it, and have no ? "
            "or #: give it as http://127.0.0.1:8000/v1"
        )
