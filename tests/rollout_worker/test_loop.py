"""The table of leases of one worker: what ends, under which record, and what is returned."""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import types
from typing import ClassVar

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.environments.environment_use import EnvironmentUse
from rollout_worker.fetcher import Fetcher, pull_shared
from rollout_worker.loop import WorkLoop
from rollout_worker.rewards.spending import Spending
from rollout_worker.worker import CanaryFailed
from rollout_worker.worker_records import EngineUse, EvalRequest, LeaseOutcome, LeaseResult, Orders
from services.process import failpoints
from services.process.activity import HangWatch
from services.process.background import BackgroundFailed
from services.process.phase_clock import PhaseClock
from services.process.process_memory import process_memory
from services.wire.messages import NO_VERSION, Lease
from tests.deadlines import HANG_S, wait_until


class Core:
    """Stands for a RolloutWorker whose groups are complete when a test says so."""

    policy_version = 0
    weight_digest = ""
    canary_gap = 0.0
    decoding = False
    evaluating = False
    kept_version = NO_VERSION
    progress: ClassVar = {"tokens": 3}

    def __init__(self):
        self.begun = []
        self.swaps = []
        self.bad_canaries = 0
        self.complete = threading.Event()

    @property
    def busy(self):
        return bool(self.begun)

    def swap_policy(self, manifest, named):
        self.swaps.append(manifest.policy_version)
        if self.bad_canaries:
            self.bad_canaries -= 1
            raise CanaryFailed("other logprobs")
        self.policy_version = manifest.policy_version

    def begin_groups(self, groups):
        self.begun += groups

    def drop_cancelled(self):
        self.begun = [leased for leased in self.begun if not leased.cancelled]

    def take_spending(self):
        return Spending()

    def take_environment_use(self):
        return EnvironmentUse()

    def take_engine_use(self):
        return EngineUse()

    def stop_spending(self, why):
        self.stopped = why

    def advance(self, wait_s):
        if not self.complete.wait(0.01):
            return []
        done, self.begun = self.begun, []
        return done


class Pushes:
    """Stands for a Pusher; a test says when, and how, a group is answered."""

    failure = None
    pushing = False
    attempts = 0
    address = "learner:1"

    def __init__(self, on_result):
        self.groups = []
        self.came = threading.Condition()
        self._on_result = on_result

    def connect(self, address):
        self.address = address

    def put_group(self, leased):
        with self.came:
            self.groups.append(leased)
            self.came.notify_all()

    def wait_for(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self.groups) >= count, 300)

    def answer(self, leased, outcome=LeaseOutcome.ACCEPTED):
        lease = leased.lease
        result = LeaseResult(
            group_id=lease.group_id,
            attempt=lease.attempt,
            order_number=leased.order_number,
            outcome=outcome,
            report=None,
        )
        self._on_result(leased, result)

    def check(self):
        pass

    def take_seconds(self):
        return 0.0

    def close(self):
        pass


def shared_version(min_version, wait_s):
    """The only version of a learner in this process."""
    if min_version > 1:
        raise TimeoutError("no newer version")
    manifest = types.SimpleNamespace(policy_version=1, nbytes=8)
    return manifest, {"w": np.zeros(2, np.float32)}


def no_version(min_version, sources, wait_s):
    raise TimeoutError("no newer version")


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def loop(core):
    with open_loop(core, no_version) as loop:
        yield loop


@contextlib.contextmanager
def open_loop(core, pull):
    loop = WorkLoop(
        core,
        PhaseClock(),
        make_fetcher=lambda wake: Fetcher(pull, ("learner:1",), wake),
        make_pusher=lambda ended, wake: Pushes(ended),
        memory=lambda: process_memory(None),
        weights_timeout_s=HANG_S,
    )
    yield loop
    core.complete.set()
    loop.close()


def lease(group_id, attempt=0, version=0):
    return Lease(
        group_id=group_id, attempt=attempt, epoch=0, position=0, min_policy_version=version
    )


def test_a_lease_ends_with_the_answer_to_its_own_group(loop, core):
    """Not with that to an earlier lease of the same group and attempt, which was cancelled."""
    core.complete.set()
    loop.order(Orders(leases=(lease("a"),)))
    loop._pusher.wait_for(1)
    loop.order(Orders(cancel=("a",), leases=(lease("a"),)))
    loop._pusher.wait_for(2)
    first, second = loop._pusher.groups
    loop._pusher.answer(first, LeaseOutcome.STALE)
    news = loop.news(0.0)
    assert news.results == () and news.held == 1
    loop._pusher.answer(second)
    news = loop.news(0.0)
    assert [result.outcome for result in news.results] == [LeaseOutcome.ACCEPTED]
    assert news.held == 0 and not news.drained


def test_a_cancelled_group_is_neither_pushed_nor_counted(loop, core):
    loop.order(Orders(leases=(lease("a"), lease("b"))))
    loop.order(Orders(cancel=("a",)))
    assert loop.news(0.0).held == 1
    core.complete.set()
    loop._pusher.wait_for(1)
    loop.order(Orders(leases=(lease("c"),)))
    loop._pusher.wait_for(2)
    assert [leased.lease.group_id for leased in loop._pusher.groups] == ["b", "c"]


def test_a_lease_that_comes_again_without_being_cancelled_replaces_the_first(loop, core):
    loop.order(Orders(leases=(lease("a"),)))
    loop.order(Orders(leases=(lease("a", attempt=1),)))
    core.complete.set()
    loop._pusher.wait_for(1)
    assert [leased.lease.attempt for leased in loop._pusher.groups] == [1]
    assert loop.news(0.0).held == 1


def test_groups_begin_in_order_and_none_overtakes_one_that_waits_for_a_version(loop, core):
    core.complete.set()
    given = (lease("a"), lease("b", version=1), lease("c"))
    loop.order(Orders(leases=given))
    loop._pusher.wait_for(1)
    loop.order(Orders(drain=True))
    news = loop.news(0.0)
    ends = {result.group_id: result.outcome for result in news.results}
    assert ends == {"b": LeaseOutcome.RETURNED, "c": LeaseOutcome.RETURNED}
    assert not news.drained
    loop._pusher.answer(loop._pusher.groups[0])
    assert loop.news(0.0).drained


def test_a_version_whose_canary_fails_is_placed_once_more(core):
    core.bad_canaries = 1
    with open_loop(core, pull_shared(shared_version)) as loop:
        assert loop.call(1, lambda: core.policy_version, HANG_S) == 1
        (transfer,) = loop.news(0.0).transfers
    assert core.swaps == [1, 1]
    assert (transfer.wire_bytes, transfer.version_bytes, transfer.depth) == (0, 8, 0)


def test_a_canary_that_fails_twice_ends_the_worker(core):
    core.bad_canaries = 2
    with open_loop(core, pull_shared(shared_version)) as loop:
        while core.bad_canaries:
            time.sleep(0.01)
        with pytest.raises(BackgroundFailed, match="other logprobs"):
            loop.news(HANG_S)


class SwapHangs(Core):
    def swap_policy(self, manifest, named):
        time.sleep(HANG_S)


def hang_of(loop, now_s: float = 0.0) -> str:
    """What a watch says of a loop that answers, after reports over a made-up hour."""
    watch = HangWatch()
    for second in range(400):
        watch.note(loop.news(0.0).activity, now_s + second)
    return watch.hang(3600.0)


def wait_until_it_says(loop, doing) -> None:
    wait_until(lambda: loop.news(0.0).activity.doing == doing, f"the loop to be at {doing}")


def test_a_hang_in_decode_shows_although_the_worker_answers_R8(core, tmp_path):
    failpoints.install(tmp_path)
    failpoints.arm(tmp_path, "worker.decode", "hang")
    try:
        with open_loop(core, no_version) as loop:
            assert hang_of(loop) == "", "it waits for leases"
            loop.order(Orders(leases=(lease("a"),)))
            wait_until(lambda: bool(failpoints.fired(tmp_path, "worker.decode")), "the hang")
            assert hang_of(loop).startswith("no progress for 399 s in unexplained (tokens 3")
            loop._closed = True
            loop.close = lambda: None  # the thread hangs until this process ends
    finally:
        failpoints.install(None)


def test_a_hang_in_a_swap_shows(core):
    with open_loop(SwapHangs(), pull_shared(shared_version)) as loop:
        wait_until_it_says(loop, "weights_swap")
        assert hang_of(loop).startswith("no progress for 399 s in weights_swap")
        loop.close = lambda: None


def test_a_hang_in_a_push_shows_once_nothing_else_is_to_do(core):
    with open_loop(core, no_version) as loop:
        wait_until_it_says(loop, "idle")
        loop._pusher.pushing = True
        assert hang_of(loop).startswith("no progress for 399 s in push (tokens 3, pushes 0)")
        loop._pusher.pushing = False
        assert hang_of(loop) == ""


def test_a_group_that_cannot_be_completed_is_named_as_the_cause(core):
    def advance(wait_s):
        raise TypeError("an item holds something that is no JSON value")

    core.advance = advance
    with open_loop(core, no_version) as loop:
        loop.order(Orders(leases=(lease("a"),)))
        with pytest.raises(BackgroundFailed, match="GroupsFailed: TypeError: an item holds"):
            for _ in range(2):  # the first answer is the version
                loop.news(HANG_S)


def told(loop):
    """What a worker's driver wants of it, as it understands it."""
    groups = {name: (one.lease.attempt, one.order_number) for name, one in loop._groups.items()}
    return groups, loop._draining, loop._fetcher._sources, loop._pusher.address


@contextlib.contextmanager
def waiting_loop():
    """A loop whose leases never begin, since no version comes."""
    with open_loop(Core(), no_version) as loop:
        yield loop


def test_a_late_cancel_leaves_a_newer_lease_alone_R16():
    with waiting_loop() as loop:
        loop.order(Orders(number=1, leases=(lease("a", version=9),)))
        loop.order(Orders(number=3, leases=(lease("a", version=9),)))
        loop.order(Orders(number=2, cancel=("a",)))
        assert told(loop)[0] == {"a": (0, 3)}


def test_a_lease_that_arrives_after_its_cancel_is_not_begun_R16():
    with waiting_loop() as loop:
        loop.order(Orders(number=2, cancel=("a",)))
        loop.order(Orders(number=1, leases=(lease("a", version=9), lease("b", version=9))))
        assert told(loop)[0] == {"b": (0, 1)}


def test_addresses_of_an_earlier_learner_that_arrive_late_are_not_used_R16():
    with waiting_loop() as loop:
        loop.order(Orders(number=2, learner_address="new:1", sources=("new:1",)))
        loop.order(Orders(number=1, learner_address="old:1", sources=("relay:1", "old:1")))
        assert told(loop)[2:] == (("new:1",), "new:1")


def said_as_orders(kind, value):
    return {
        "lease": Orders(leases=(lease(value, version=9),)),
        "cancel": Orders(cancel=(value,)),
        "swap": Orders(cancel=("a", "b"), leases=(lease("b", version=9), lease("c", version=9))),
        "learner": Orders(learner_address=value, sources=(f"{value}:1",)),
    }[kind]


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["lease", "cancel", "swap", "learner"]), st.sampled_from("abc")),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
@hypothesis.settings(max_examples=25)
def test_in_whichever_order_orders_arrive_the_worker_ends_up_alike_R16(said, random):
    sent = [
        dataclasses.replace(said_as_orders(*one), number=number)
        for number, one in enumerate(said, 1)
    ]
    states = []
    for arrived in (sent, random.sample(sent, len(sent))):
        with waiting_loop() as loop:
            for orders in arrived:
                loop.order(orders)
            states.append(told(loop))
    assert states[0] == states[1]


def test_what_an_order_said_is_forgotten_once_all_before_it_are_here_R16():
    with waiting_loop() as loop:
        for number in (1, 3, 4, 2, 5):
            loop.order(Orders(number=number, cancel=(f"g{number}",)))
        assert not loop._latest._numbers


class EvaluatingCore(Core):
    """Core that has shares of an evaluation too; a test says when a prompt is complete."""

    def __init__(self):
        super().__init__()
        self.share = None
        self.done = []
        self.prompts = threading.Semaphore(0)

    @property
    def evaluating(self):
        return self.share is not None

    @property
    def busy(self):
        return bool(self.begun) or self.evaluating

    def keep_version(self, version):
        self.kept_version = version if version <= self.policy_version else NO_VERSION
        self.done.append(f"keep {version}")

    def swap_policy(self, manifest, named):
        assert not self.evaluating
        super().swap_policy(manifest, named)

    def begin_groups(self, groups):
        assert not self.evaluating
        super().begin_groups(groups)
        self.done += [leased.lease.group_id for leased in groups]

    def begin_evaluation(self, share):
        assert not self.busy
        self.share = share
        self.done.append(f"evaluate {share.left}")

    def pause_evaluation(self):
        self.share = None
        self.done.append("pause")

    def advance(self, wait_s):
        if not self.evaluating:
            return super().advance(wait_s)
        if self.prompts.acquire(timeout=0.01):
            self.share.add_items(self.share.left[0], [f"item {self.share.left[0]}"])
        if self.share.ended:
            self.share = None
        return []


def share_of(*positions, version=0):
    return EvalRequest(
        positions=positions,
        policy_version=version,
        samples=1,
        sampling=SamplingSettings(temperature=0.0),
        timeout_s=HANG_S,
        when_idle=True,
    )


@contextlib.contextmanager
def asked(loop, request):
    """Has the loop evaluate in a thread; gives the future of what it returns."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        yield threads.submit(loop.evaluate_when_idle, request)


def test_a_share_is_completed_where_nothing_else_is_to_do_and_gives_way_to_a_lease():
    core = EvaluatingCore()
    with open_loop(core, no_version) as loop:
        loop.order(Orders(keep_version=0))
        wait_until(lambda: core.kept_version == 0, "the version that is kept")
        assert loop.news(0.0).kept_version == 0
        with asked(loop, share_of(4, 7)) as result:
            wait_until(lambda: core.evaluating, "the share to begin")
            core.prompts.release()
            wait_until(lambda: core.share is not None and core.share.left == [7], "a prompt")
            loop.order(Orders(leases=(lease("a"),)))
            wait_until(lambda: "a" in core.done, "the group to begin")
            core.complete.set()
            core.prompts.release()
            assert result.result(HANG_S) == ["item 4", "item 7"]
    assert core.done == ["keep 0", "evaluate [4, 7]", "pause", "a", "evaluate [7]"]


def test_a_share_gives_way_to_a_newer_version_and_goes_on_under_its_own():
    core, newer = EvaluatingCore(), threading.Event()

    def pull(min_version, sources, wait_s):
        if min_version > 1 or not newer.wait(0.01):
            raise TimeoutError("no newer version")
        return types.SimpleNamespace(
            manifest=types.SimpleNamespace(policy_version=1),
            named={},
            stats=types.SimpleNamespace(seconds=0.0),
        )

    with open_loop(core, pull) as loop:
        loop.order(Orders(keep_version=0))
        with asked(loop, share_of(4)) as result:
            wait_until(lambda: core.evaluating, "the share to begin")
            newer.set()
            wait_until(lambda: core.policy_version == 1 and core.evaluating, "the swap")
            core.prompts.release()
            assert result.result(HANG_S) == ["item 4"]
    assert core.done == ["keep 0", "evaluate [4]", "pause", "evaluate [4]"]


def test_a_share_whose_version_is_not_kept_comes_back_without_result():
    core = EvaluatingCore()
    with open_loop(core, no_version) as loop:
        assert loop.evaluate_when_idle(share_of(4)) == []
        loop.order(Orders(keep_version=0))
        wait_until(lambda: core.kept_version == 0, "the version that is kept")
        with asked(loop, share_of(4)) as result:
            wait_until(lambda: core.evaluating, "the share to begin")
            loop.order(Orders(keep_version=NO_VERSION))
            assert result.result(HANG_S) == []


def test_a_worker_that_ends_leaves_no_share_waiting():
    core = EvaluatingCore()
    with open_loop(core, no_version) as loop:
        loop.order(Orders(keep_version=0))
        with asked(loop, share_of(4)) as result:
            wait_until(lambda: core.evaluating, "the share to begin")
            loop.stop()
            assert result.result(HANG_S) == []


def test_a_version_that_is_to_be_kept_is_taken_before_a_newer_one():
    pulled = threading.Semaphore(0)

    def pull(min_version, sources, wait_s):
        if min_version > 3 or not pulled.acquire(timeout=0.01):
            raise TimeoutError("no newer version")
        return types.SimpleNamespace(
            manifest=types.SimpleNamespace(policy_version=max(1, min_version)),
            named={},
            stats=types.SimpleNamespace(seconds=0.0),
        )

    fetcher = Fetcher(pull, ("learner:1",), lambda: None)
    try:
        fetcher.keep_version(2)
        for _ in range(3):
            pulled.release()
        wait_until(lambda: len(fetcher._records) == 3, "three versions")
        taken = [fetcher.take_version(), fetcher.take_version()]
        assert [one.manifest.policy_version for one in taken] == [2, 3]
        assert fetcher.take_version() is None
    finally:
        fetcher.close()
