"""When a process that answers counts as hanging."""

import pytest

from services.process.activity import Activity, HangWatch

STEP_S = 120.0
BOUND_S = 10.0
"""A twelfth of it."""


def watched(*reports: tuple[float, str, int], slack_s: float = 0.0) -> str:
    """What a watch says after reports of (time, phase, tokens)."""
    watch = HangWatch()
    for at_s, doing, tokens in reports:
        watch.note(Activity(doing=doing, counters={"tokens": tokens}, slack_s=slack_s), at_s)
    return watch.hang(STEP_S)


def every_second(doing: str, *, tokens=lambda n: 7, seconds=12) -> list[tuple[float, str, int]]:
    return [(float(n), doing, tokens(n)) for n in range(seconds)]


@pytest.mark.parametrize(
    "doing",
    (
        *("decode", "prefill", "reward", "weights_swap", "push", "eval", "unexplained"),
        *("forward_backward", "optimizer", "publish", "serialise"),
    ),
)
def test_counters_that_stand_are_a_hang_R8(doing):
    said = watched(*every_second(doing))
    assert said.startswith(f"no progress for 11 s in {doing} (tokens 7); if one piece of its work")
    assert watched(*every_second(doing, seconds=10)) == ""
    assert watched(*every_second(doing, tokens=lambda n: n // 9)) == "", "it moved meanwhile"


@pytest.mark.parametrize("doing", ["compile", "checkpoint", "idle", "queue_wait", "weights_wait"])
def test_compilations_checkpoints_and_waits_may_take_long(doing):
    assert watched(*every_second(doing, seconds=1000)) == ""
    after = [(1000.0 + n, "decode", 7) for n in range(10)]
    assert watched(*every_second(doing, seconds=1000), *after) == "", "it counts from its end on"


def test_time_without_reports_does_not_count():
    """The one who asks was paused, or the one who answers; other bounds are for the latter."""
    assert watched((0.0, "decode", 7), (500.0, "decode", 7), (501.0, "decode", 7)) == ""
    assert watched((0.0, "decode", 7), *[(500.0 + n, "decode", 7) for n in range(12)]) != ""


def test_a_scorer_may_take_the_time_that_the_configuration_gives_it():
    assert watched(*every_second("reward", seconds=30), slack_s=20.0) == ""
    assert watched(*every_second("reward", seconds=32), slack_s=20.0) != ""
