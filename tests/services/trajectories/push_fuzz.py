"""Pushes that must not be taken: `python -m tests.services.trajectories.push_fuzz`.

A real server over mutual TLS gets duplicate, stale, forged, malformed and oversized pushes, drawn
with a seed. Each must be refused with the status that trajectories.proto names, none may reach the
learner, and the server must take a good group afterwards.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import grpc

from services.pb import trajectories_pb2
from services.trajectories import codec
from services.trajectories.buffer_records import BufferCounts
from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.service import trajectory_service
from services.wire.channel import CLIENT_OPTIONS, open_channel
from services.wire.server import Server
from services.wire.tls import Credentials, RunAuthority
from tests.deadlines import HANG_S
from tests.services.group_rules import group_rules
from tests.services.trajectories.push_kinds import (
    ISSUED,
    LONGEST,
    MAX_STALENESS,
    OK,
    RUN_ID,
    USED,
    VOCAB,
    Push,
    draw_push,
    good_group,
    whole_push,
)

THREADS = 4
CALL_S = HANG_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class FuzzReport:
    """What became of all pushes."""

    answers: Mapping[tuple[str, str], int]
    """Pushes by kind and status."""
    wrong: list[str]
    """One line for every push with another answer than it should have."""
    counts: BufferCounts
    """Of the server's buffer, before the good group."""
    alive: bool
    """A good group was accepted afterwards."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Only the group from before the fuzzing was ever accepted."""
        only_one = (self.counts.accepted, self.counts.taken, self.counts.waiting) == (1, 1, 0)
        return only_one and not self.wrong and self.alive


def run_fuzz(
    messages: int,
    seed: int,
    *,
    make_buffer: Callable[[], GroupBuffer] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> FuzzReport:
    """Fuzzes a server of its own.

    Args:
        messages: pushes in all.
        seed: of what is drawn; which thread sends what does not matter.
        make_buffer: another buffer than the service has, to try the fuzzer itself.
        say: hears of the progress.
    """
    authority = RunAuthority.create(RUN_ID)
    buffer = _prepared((make_buffer or _real_buffer)())
    started = time.monotonic()
    answers: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong: list[str] = []
    lock = threading.Lock()

    def send(part: int) -> None:
        with _open(server.address, authority.issue(f"rollout-{part}")) as channel:
            call = channel.stream_unary(f"/{codec.TRAJECTORY_SERVICE}/PushGroup")
            for number in range(part, messages, THREADS):
                push = draw_push(random.Random(f"{seed}-{number}"), number)
                status, text = _answer(call, push)
                with lock:
                    answers[push.kind, status.name] += 1
                    if status is not push.expected:
                        wrong.append(f"push {number}, {push.kind}: {status.name}: {text}")
                    if sum(answers.values()) % 10_000 == 0:
                        say(f"{sum(answers.values())} of {messages}")

    with (
        Server(authority.issue("learner"), [trajectory_service(buffer)]) as server,
        concurrent.futures.ThreadPoolExecutor(THREADS) as pool,
    ):
        for done in [pool.submit(send, part) for part in range(THREADS)]:
            done.result()
        counts = buffer.counts()
        with _open(server.address, authority.issue("rollout-0")) as channel:
            call = channel.stream_unary(f"/{codec.TRAJECTORY_SERVICE}/PushGroup")
            good = Push(kind="good", messages=whole_push(good_group("good")), expected=OK)
            alive = _answer(call, good) == (OK, "ACCEPTED")
    return FuzzReport(
        answers=answers,
        wrong=wrong,
        counts=counts,
        alive=alive,
        seconds=time.monotonic() - started,
    )


def table(report: FuzzReport) -> Iterator[str]:
    """The report as lines."""
    yield f"{'kind':<34} {'status':<20} {'pushes':>8}"
    for (kind, status), count in sorted(report.answers.items()):
        yield f"{kind:<34} {status:<20} {count:>8}"
    yield from report.wrong[:20]
    total = sum(report.answers.values())
    yield (
        f"push_fuzz: messages {total}, wrong status {len(report.wrong)}, accepted "
        f"{report.counts.accepted - 1}, in the buffer {report.counts.waiting}, server "
        f"{'alive' if report.alive else 'dead'}, seconds {report.seconds:.0f}"
    )


def _real_buffer() -> GroupBuffer:
    return GroupBuffer(
        group_rules(
            RUN_ID, vocab_size=VOCAB, max_prompt_tokens=LONGEST, max_completion_tokens=LONGEST
        ),
        capacity_groups=64,
        capacity_bytes=2**26,
        max_staleness=MAX_STALENESS,
    )


def _prepared(buffer: GroupBuffer) -> GroupBuffer:
    for version, digest in ISSUED.items():
        buffer.issue(version, digest)
    buffer.put_group(good_group(USED))
    buffer.take_groups([USED], 0.0)
    return buffer


def _open(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel that sends what our own clients would not."""
    cap = "grpc.max_send_message_length"
    options = [option for option in CLIENT_OPTIONS if option[0] != cap]
    return open_channel(address, credentials, [*options, (cap, -1)])


def _answer(call, push: Push) -> tuple[grpc.StatusCode, str]:
    """Status and text; an accepted group is never OK, unless it was to be."""
    try:
        raw = call(iter(push.messages), timeout=CALL_S)
    except grpc.RpcError as error:
        return error.code(), str(error.details())  # pyright: ignore[reportAttributeAccessIssue]
    outcome = trajectories_pb2.PushGroupResponse.FromString(raw).outcome
    name = trajectories_pb2.PushGroupResponse.Outcome.Name(outcome)
    if name == "ACCEPTED" and push.kind != "good":
        return grpc.StatusCode.UNKNOWN, "was accepted"
    return OK, name


def main(arguments: list[str] | None = None) -> int:
    """Prints what became of the pushes; 1 where one was not refused as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.services.trajectories.push_fuzz", description=__doc__
    )
    parser.add_argument("--messages", type=int, default=100_000, help="pushes (default: 10^5)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.messages < 1:
        parser.error(f"--messages must be at least 1, got {given.messages}")
    report = run_fuzz(
        given.messages, given.seed, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    print("\n".join(table(report)))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
