"""Pushes that must not be taken, and what the server must answer to each kind.

The server that they are for has issued the versions of ISSUED, and has given away the group USED.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np

from services.pb import trajectories_pb2
from services.trajectories import codec
from services.trajectories.group_check import MOST_NAMES
from services.trajectories.service import MAX_GROUP_BYTES
from services.wire.channel import MESSAGE_CAP_BYTES
from services.wire.messages import Completion, FinishReason, Group

RUN_ID = "fuzz"
USED = "used"
"""The one group that was taken before the fuzzing."""
ISSUED = {version: hashlib.sha256(bytes([version])).hexdigest() for version in range(6)}
MAX_STALENESS = 1
VOCAB = 369
LONGEST = 40
"""Tokens of a prompt or completion."""
CURRENT = max(ISSUED)

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
Message = bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One call, and what must become of it."""

    kind: str
    messages: list[Message]
    expected: grpc.StatusCode


def good_group(group_id: str, **changes) -> Group:
    """A group that a server of `run_fuzz` accepts, but for the changes."""
    group = Group(
        run_id=RUN_ID,
        group_id=group_id,
        attempt=0,
        prompt_id=1,
        epoch=0,
        policy_version=CURRENT,
        weight_digest=ISSUED[CURRENT],
        worker="rollout-0",
        prompt_token_ids=np.array([5, 6], np.int32),
        completions=(_completion(0), _completion(1)),
        phase_s={"decode": 1.0},
    )
    return dataclasses.replace(group, **changes)


def draw_push(rng: random.Random, number: int) -> Push:
    """One push that must not be taken, of any kind."""
    kind = rng.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
    _, expected, build = KINDS[kind]
    return Push(kind=kind, messages=build(rng, f"fuzz-{number}"), expected=expected)


def _completion(index: int, **changes) -> Completion:
    completion = Completion(
        sample_index=index,
        token_ids=np.array([7, 8, 2], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5, -0.1], np.float32),
        finish_reason=FinishReason.STOP,
        rewards={"answer": 1.0},
        total_reward=1.0,
    )
    return dataclasses.replace(completion, **changes)


def _header(raw: bytes, group_id: str, **changes) -> Message:
    fields: dict[str, Any] = dict(
        run_id=RUN_ID,
        group_id=group_id,
        attempt=0,
        size_bytes=len(raw),
        sha256=hashlib.sha256(raw).digest(),
    )
    header = trajectories_pb2.PushGroupHeader(**(fields | changes))
    return trajectories_pb2.PushGroupRequest(header=header).SerializeToString()


def _data(raw: bytes) -> Message:
    return trajectories_pb2.PushGroupRequest(data=raw).SerializeToString()


def whole_push(group: Group) -> list[Message]:
    """A push of a group as a client would send it, in one piece."""
    raw = codec.encode_group(group)
    return [_header(raw, group.group_id, run_id=group.run_id, attempt=group.attempt), _data(raw)]


def _duplicate(rng: random.Random, _: str) -> list[Message]:
    version = rng.choice([*ISSUED, CURRENT + 3])
    digest = rng.choice([ISSUED[CURRENT], "f" * 64])
    group = good_group(USED, attempt=rng.randrange(5), policy_version=version, weight_digest=digest)
    return whole_push(group)


def _stale(rng: random.Random, group_id: str) -> list[Message]:
    version = rng.randrange(CURRENT - MAX_STALENESS)
    digest = rng.choice([ISSUED[version], ISSUED[CURRENT], ""])
    return whole_push(good_group(group_id, policy_version=version, weight_digest=digest))


def _forged(rng: random.Random, group_id: str) -> list[Message]:
    if rng.random() < 0.5:
        version = CURRENT + rng.randrange(1, 2**40)
        return whole_push(good_group(group_id, policy_version=version))
    version = CURRENT - rng.randrange(MAX_STALENESS + 1)
    right = ISSUED[version]
    place = rng.randrange(len(right))
    forged = [
        right[:place] + ("0" if right[place] != "0" else "1") + right[place + 1 :],
        right.upper() if right.upper() != right else "",
        right + "0",
        "",
        ISSUED[CURRENT - version],
    ]
    digest = rng.choice([digest for digest in forged if digest != right])
    return whole_push(good_group(group_id, policy_version=version, weight_digest=digest))


def _bad_group(rng: random.Random, group_id: str) -> list[Message]:
    return whole_push(good_group(group_id, **rng.choice(_BAD_GROUPS)))


def _bad_completion(rng: random.Random, group_id: str) -> list[Message]:
    bad = _completion(1, **rng.choice(_BAD_COMPLETIONS))
    completions = [_completion(0), bad]
    rng.shuffle(completions)
    return whole_push(good_group(group_id, completions=tuple(completions)))


def _bad_field(rng: random.Random, group_id: str) -> list[Message]:
    """What our own encoder would not write."""
    message = trajectories_pb2.Group.FromString(codec.encode_group(good_group(group_id)))
    completion = message.completions[rng.randrange(2)]
    extra = bytes(rng.randrange(1, 4))
    match rng.randrange(4):
        case 0:
            completion.token_ids += extra
        case 1:
            completion.behavior_logprobs += extra
        case 2:
            message.prompt_token_ids += extra
        case _:
            completion.finish_reason = rng.choice([0, 4, 99])  # pyright: ignore
    raw = message.SerializeToString()
    return [_header(raw, group_id), _data(raw)]


def _bad_push(rng: random.Random, group_id: str) -> list[Message]:
    """A good group, pushed against the rules of the stream."""
    raw = codec.encode_group(good_group(group_id))
    header, whole = _header(raw, group_id), _data(raw)
    at = rng.randrange(len(raw))
    flipped = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    noise = rng.randbytes(rng.randrange(1, 200))
    return rng.choice(
        [
            [],
            [b""],
            [whole],
            [whole, header],
            [header],
            [header, header],
            [header, _data(raw[:at])],
            [header, _data(b""), whole],
            [header, whole, _data(noise)],
            [header, _data(flipped)],
            [_header(raw, group_id, sha256=noise[:32]), whole],
            [_header(raw, group_id, run_id="another"), whole],
            [_header(raw, "another"), whole],
            [_header(raw, group_id, attempt=rng.randrange(1, 2**40)), whole],
            [_header(raw, group_id, size_bytes=len(raw) + rng.randrange(1, 9)), whole],
            [_header(noise, group_id), _data(noise)],
        ]
    )


def _bad_size(rng: random.Random, group_id: str) -> list[Message]:
    raw = codec.encode_group(good_group(group_id))
    size = rng.choice(
        [0, -rng.randrange(1, 2**62), MAX_GROUP_BYTES + 1, rng.randrange(MAX_GROUP_BYTES, 2**62)]
    )
    return [_header(raw, group_id, size_bytes=size or -1), _data(raw)]


def _too_long(rng: random.Random, group_id: str) -> list[Message]:
    """One message above the cap of the wire."""
    raw = bytes(MESSAGE_CAP_BYTES + rng.randrange(1, 2**20))
    return [_header(raw, group_id), _data(raw)]


def _no_message(rng: random.Random, group_id: str) -> list[Message]:
    """Announces more bytes of a field than follow."""
    noise = rng.randbytes(rng.randrange(0, 60))
    broken = b"\x0a" + bytes([len(noise) + rng.randrange(1, 60)]) + noise
    raw = codec.encode_group(good_group(group_id))
    return rng.choice([[broken], [_header(raw, group_id), broken]])


def _array(*values: float, dtype: type = np.float32) -> np.ndarray:
    return np.array(values, dtype)


_BAD_GROUPS: list[dict] = [
    {"run_id": "another"},
    {"attempt": -1},
    {"prompt_id": -1},
    {"epoch": -7},
    {"policy_version": -1},
    {"prompt_token_ids": _array(dtype=np.int32)},
    {"prompt_token_ids": _array(3, -1, dtype=np.int32)},
    {"prompt_token_ids": _array(3, VOCAB, dtype=np.int32)},
    {"prompt_token_ids": _array(3, 10**6, dtype=np.int32)},
    {"prompt_token_ids": _array(*[3] * (LONGEST + 1), dtype=np.int32)},
    {"completions": ()},
    {"completions": (_completion(0), _completion(0))},
    {"completions": (_completion(-1), _completion(0))},
    {"completions": (_completion(0),)},
    {"completions": (_completion(0), _completion(1), _completion(2))},
    {"completions": (_completion(0), _completion(7))},
    {"phase_s": {"no_such_phase": 1.0}},
    {"phase_s": {"decode": float("nan")}},
    {"phase_s": {"decode": -1.0}},
    {"phase_s": {"decode": float("inf")}},
]
_EPISODE = {"segment_tokens": (1, 1, 1), "behavior_logprobs": _array(-1.0, -1.0)}
_BAD_COMPLETIONS: list[dict] = [
    {"token_ids": _array(dtype=np.int32)},
    {"token_ids": _array(7, 8, dtype=np.int32)},
    {"token_ids": _array(7, -8, 2, dtype=np.int32)},
    {"token_ids": _array(7, 10**6, 2, dtype=np.int32)},
    {"token_ids": _array(7, 8, VOCAB, dtype=np.int32)},
    {"token_ids": _array(7, 8, 2**31 - 1, dtype=np.int32)},
    {
        "token_ids": _array(*[3] * (LONGEST + 1), dtype=np.int32),
        "behavior_logprobs": _array(*[-1.0] * (LONGEST + 1)),
    },
    {"segment_tokens": (3,)},
    {"segment_tokens": (1, 2)},
    {"segment_tokens": (1, 1, 1)},
    {"segment_tokens": (1, 1, 2), "behavior_logprobs": _array(-1.0, -1.0)},
    {"segment_tokens": (2, 0, 1)},
    {"segment_tokens": (3, -1, 1)},
    {"segment_tokens": (0, 2, 1), "behavior_logprobs": _array(-1.0)},
    {"segment_tokens": (1, 1, 1, 0), "behavior_logprobs": _array(-1.0, -1.0)},
    {"segment_tokens": (1, 1, 1), "behavior_logprobs": _array(-1.0)},
    {"record_starts": (1,)},
    {**_EPISODE, "record_starts": (0,)},
    {**_EPISODE, "record_starts": (2,)},
    {**_EPISODE, "record_starts": (-1,)},
    {**_EPISODE, "record_starts": (3,)},
    {**_EPISODE, "record_starts": (1, 1)},
    {"behavior_logprobs": _array(-1.0, -81.0, -1.0)},
    {"behavior_logprobs": _array(-1.0, -3e38, -1.0)},
    {"rewards": {f"answer/{number}": 1.0 for number in range(MOST_NAMES + 1)}},
    {"behavior_logprobs": _array(-1.0)},
    {"behavior_logprobs": _array(-1.0, float("nan"), -1.0)},
    {"behavior_logprobs": _array(-1.0, float("-inf"), -1.0)},
    {"behavior_logprobs": _array(-1.0, 0.5, -1.0)},
    {"behavior_logprobs": _array(-1.0, float("inf"), -1.0)},
    {"total_reward": float("nan")},
    {"total_reward": float("inf")},
    {"reward_error": "answer: timed out"},
    {"rewards": {"answer": float("nan")}},
]

KINDS: Mapping[str, tuple[float, grpc.StatusCode, Callable[[random.Random, str], list[Message]]]]
KINDS = {
    "duplicate": (15, OK, _duplicate),
    "stale": (15, grpc.StatusCode.FAILED_PRECONDITION, _stale),
    "forged receipt": (15, grpc.StatusCode.NOT_FOUND, _forged),
    "malformed group": (15, INVALID, _bad_group),
    "malformed completion": (15, INVALID, _bad_completion),
    "malformed field": (8, INVALID, _bad_field),
    "malformed push": (15, INVALID, _bad_push),
    "oversized group": (10, INVALID, _bad_size),
    "oversized message": (0.1, grpc.StatusCode.RESOURCE_EXHAUSTED, _too_long),
    # gRPC itself answers a message that cannot be parsed.
    "no message of the protocol": (5, grpc.StatusCode.INTERNAL, _no_message),
}
"""Share, right answer and maker of every kind."""
