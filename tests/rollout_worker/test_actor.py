"""Learner and worker in one process, over real sockets: weights one way, groups the other.

Both see the eight CPU devices: the learner cuts its matrices over them, the worker its rows.
"""

import concurrent.futures
import dataclasses
import datetime
import time

import jax
import numpy as np
import pytest

from learner.actor import LearnerActor
from learner.durable.rollout_file import read_groups, scan_rollouts
from rollout_worker.actor import RolloutActor
from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.config.rollout_config import DecodeConfig, RolloutConfig
from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import Score
from rollout_worker.worker import WeightDigestMismatch
from rollout_worker.worker_core import WorkerCore
from rollout_worker.worker_records import EvalRequest, LeaseOutcome, Orders, RolloutSpec
from services.process.background import BackgroundFailed
from services.process.phase_clock import PhaseClock
from services.wire.messages import FinishReason, Lease
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S, wait_until
from tests.ipv6 import needs_ipv6
from tests.learner import tiny_learner
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]

G = 4
MOMENT = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=datetime.UTC)
GREEDY = SamplingSettings(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def authority():
    return RunAuthority.create("run")


def learner_spec(model, authority, folder, **changes):
    settings = dict(
        max_completion_tokens=8, max_staleness=0, weights_dtype="float32", keep_checkpoints=1
    )
    return tiny_learner.learner_spec(model, authority, folder, **{**settings, **changes})


def make_learner(model, authority, folder, **changes):
    return LearnerActor(learner_spec(model, authority, folder, **changes))


def worker_spec(model, authority, address, **changes):
    settings = dict(
        name="rollout-0",
        run_id="run",
        seed=0,
        platform="cpu",
        model_path=str(model),
        tokenizer=None,
        chat_template=None,
        stop_tokens=(),
        moment=MOMENT,
        data=DataConfig(
            train=SourceConfig(source="reasoning_gym:chain_sum", size=8),
            eval=SourceConfig(source="reasoning_gym:chain_sum", size=5, seed=99),
        ),
        rollout=RolloutConfig(
            prompts_per_step=2,
            completions_per_prompt=G,
            max_prompt_tokens=192,
            max_completion_tokens=8,
            decode=DecodeConfig(slots=8, segment_tokens=4, compute_dtype="float32"),
        ),
        reward=RewardConfig(
            functions=(RewardFunctionConfig(name="tests.slow_reward:score", params={"seconds": 0}),)
        ),
        learner_address=address,
        credentials=authority.issue("rollout-0"),
        weights_dtype="float32",
        bind_host="127.0.0.1",
        streams=2,
        chunk_bytes=4096,
        deltas=True,
        canary=True,
        canary_bound=None,
        timeout_s=HANG_S,
        run_folder="/nowhere",
        samples_per_step=2,
    )
    return RolloutSpec(**{**settings, **changes})


def make_worker(model, authority, address, **changes):
    return RolloutActor(worker_spec(model, authority, address, **changes))


@pytest.fixture(scope="module")
def pair(model, authority, tmp_path_factory):
    learner = make_learner(model, authority, tmp_path_factory.mktemp("run"))
    worker = make_worker(model, authority, learner.describe().address)
    learner.publish()
    yield learner, worker
    worker.close()
    learner.close()


@needs_ipv6
@pytest.mark.parametrize("bind_host", ["::1", "::"])
def test_a_worker_reaches_its_learner_over_ipv6_N28(model, authority, tmp_path, bind_host):
    here = {"bind_host": bind_host}
    learner = make_learner(model, authority, tmp_path, driver_host="::1", **here)
    address = learner.describe().address
    assert address.startswith("[::1]:")
    learner.publish()
    worker = make_worker(model, authority, address, **here)
    assert outcomes(rollout(worker, leases(0))) == {LeaseOutcome.ACCEPTED}
    worker.close()
    learner.close()


def leases(*indices, attempt=0, version=0):
    return [
        Lease(
            group_id=f"g{i:08d}",
            attempt=attempt,
            epoch=0,
            position=i % 8,
            min_policy_version=version,
        )
        for i in indices
    ]


def rollout(worker, given, timeout_s=HANG_S):
    """Has leases turned into groups in the learner's buffer; how each ended, by group id."""
    worker.order(Orders(leases=tuple(given)))
    results, deadline = {}, time.monotonic() + timeout_s
    while len(results) < len(given):
        assert time.monotonic() < deadline, f"only {sorted(results)} ended"
        results |= {result.group_id: result for result in worker.news(5.0).results}
    return results


def held_out(count, version):
    return EvalRequest(
        positions=range(count), policy_version=version, samples=1, sampling=GREEDY, timeout_s=300.0
    )


def outcomes(results):
    return {result.outcome for result in results.values()}


def on_loop(worker, run, version=0):
    """Runs something where the worker itself would."""
    return worker._loop.call(version, run, 300.0)


def rolled_out(worker, *indices):
    """Groups of the worker's core, in the order of the leases."""
    groups = on_loop(worker, lambda: list(complete(worker._core.worker, *indices)))
    return sorted(groups, key=lambda group: group.group_id)


def complete(core, *indices):
    """Yields each group as soon as it is complete; ends the others when the caller leaves."""
    begun = [LeasedGroup(lease) for lease in leases(*indices)]
    core.begin_groups(begun)
    try:
        while core.busy:
            yield from (leased.group for leased in core.advance())
    finally:
        for leased in begun:
            leased.cancelled = True
        core.drop_cancelled()


def test_a_step_goes_round(pair):
    learner, worker = pair
    first = rollout(worker, [*leases(0), dataclasses.replace(leases(1)[0], logged=True)])
    assert outcomes(first) == {LeaseOutcome.ACCEPTED}
    assert {result.report.policy_version for result in first.values()} == {0}
    assert first["g00000000"].samples == ()
    (sample,) = first["g00000001"].samples
    assert sample["policy_version"] == 0 and sample["why"] == "first"
    assert sample["completion_tokens"] == len(sample["tokens"])
    assert outcomes(rollout(worker, leases(0, 1, attempt=1))) == {LeaseOutcome.DUPLICATE}
    update = learner.update(sorted(first), [], 5.0)
    assert update.policy_version == 1
    assert set(update.outcomes.values()) == {"trained"}
    assert update.metrics["offpolicy/logprob_gap_max"] < 1e-4
    assert update.metrics["offpolicy/is_weight_raw_mean"] == pytest.approx(1.0, abs=1e-4)
    assert update.metrics["groups/duplicate"] == 2
    fresh = rollout(worker, leases(3, version=1))
    assert outcomes(fresh) == {LeaseOutcome.ACCEPTED}
    assert {result.report.policy_version for result in fresh.values()} == {1}


def test_a_newer_version_is_swapped_in_before_anything_begins(pair):
    learner, worker = pair
    rollout(worker, leases(4, version=1))
    learner.update(["g00000004"], [], 5.0)
    results = rollout(worker, leases(5, version=2))
    assert results["g00000005"].report.policy_version == 2
    assert worker.news(0.0).policy_version == 2


def test_a_worker_renders_its_prompts_at_the_moment_of_the_run_N16(model, authority):
    dated = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}" + CHAT_TEMPLATE
    spec = worker_spec(model, authority, "127.0.0.1:1", chat_template=dated)
    core = WorkerCore(spec, jax.devices(), PhaseClock())
    try:
        written = core.worker._tokenizer.decode(core._train.prompts[0].token_ids)
        assert written.startswith("2026-01-31 23:59:59<s>user:")
    finally:
        core.close()


def test_a_worker_has_a_lease_that_each_question_of_the_driver_renews_F03(
    model, authority, pair, monkeypatch
):
    calls = []

    class Lease:
        def __init__(self, *given):
            calls.append(given)

        def start(self):
            calls.append("starts")

        def renew(self):
            calls.append("renewed")

    monkeypatch.setattr("rollout_worker.actor.DriverLease", Lease)
    worker = make_worker(model, authority, pair[0].describe().address, driver_lease_s=77.0)
    try:
        assert calls == [("rollout-0", 77.0), "starts"]
        worker.news(0.0)
        assert calls[2:] == ["renewed"]
    finally:
        worker.close()


def test_the_scorers_of_a_worker_get_what_the_configuration_allows_them_R12_R15(
    model, authority, monkeypatch
):
    class Asked(Exception):
        pass

    def pool(*_, allowance, **__):
        raise Asked(allowance)

    monkeypatch.setattr("rollout_worker.worker_core.RewardPool", pool)
    own = RewardConfig(memory_gb=2.0, environment=("JUDGE_KEY",))
    spec = worker_spec(model, authority, "127.0.0.1:1", reward=own)
    with pytest.raises(Asked) as asked:
        WorkerCore(spec, jax.devices(), PhaseClock())
    assert asked.value.args == (Allowance(memory_gb=2.0, environment=("JUDGE_KEY",)),)


def test_a_worker_asks_whether_the_learner_is_there_F05(pair):
    """Else a cut between the two would show to nobody."""
    assert pair[1]._loop._probe is not None


def test_cancelled_leases_end_in_silence_and_may_come_again(pair):
    _, worker = pair
    worker.order(Orders(leases=tuple(leases(10, 11, 12))))
    worker.order(Orders(cancel=("g00000010", "g00000011", "g00000012")))
    again = rollout(worker, leases(10, 11, 12, attempt=1))
    assert {result.attempt for result in again.values()} == {1}
    assert worker.news(0.0).held == 0


def test_a_draining_worker_returns_what_it_has_not_begun(model, authority, pair):
    learner, _ = pair
    worker = make_worker(model, authority, learner.describe().address)
    try:
        on_loop(worker, lambda: None)
        begun, waits = leases(13), leases(14, version=10**6)
        worker.order(Orders(leases=(*begun, *waits)))
        while "g00000013" in worker._loop._groups:
            time.sleep(0.01)
        worker.order(Orders(drain=True))
        news = worker.news(5.0)
        ends = {result.group_id: result.outcome for result in news.results}
        assert ends["g00000014"] is LeaseOutcome.RETURNED
        assert news.drained
        worker.order(Orders(leases=tuple(leases(15))))
        assert worker.news(5.0).results[0].outcome is LeaseOutcome.RETURNED
    finally:
        worker.close()


def test_evaluation_does_not_move_the_training_draws(pair):
    _, worker = pair
    version = worker._core.worker.policy_version
    before = rolled_out(worker, 4)
    items = worker.evaluate(held_out(5, version))
    after = rolled_out(worker, 4)
    assert len(items) == 5 and {item.policy_version for item in items} == {version}
    again = worker.evaluate(held_out(5, version))
    assert [item.completion for item in items] == [item.completion for item in again]
    for one, other in zip(before[0].completions, after[0].completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_an_evaluation_when_idle_is_that_of_its_version_whatever_comes_between(pair):
    learner, worker = pair
    core = worker._core.worker
    on_loop(worker, lambda: None)  # it has a version then
    version = core.policy_version
    sampled = dataclasses.replace(held_out(5, version), samples=3, sampling=SamplingSettings())
    expected = worker.evaluate(sampled)
    worker.order(Orders(keep_version=version))
    wait_until(lambda: core.kept_version == version, "the version that is kept")
    before = rolled_out(worker, 4)
    assert outcomes(rollout(worker, leases(40, 41, version=version))) == {LeaseOutcome.ACCEPTED}
    assert learner.update(["g00000040", "g00000041"], [], 5.0).policy_version == version + 1
    rollout(worker, leases(42, version=version + 1))
    assert (core.policy_version, core.kept_version) == (version + 1, version)
    idle = dataclasses.replace(sampled, when_idle=True)
    assert worker.evaluate(idle) == expected, "to the last token, under the version that is kept"
    now = worker.evaluate(dataclasses.replace(sampled, policy_version=version + 1))
    assert {item.policy_version for item in now} == {version + 1}
    assert worker.evaluate(idle) == expected
    assert worker.news(0.0).kept_version == version
    after = rollout(worker, leases(43, version=version + 1))
    assert after["g00000043"].report.policy_version == version + 1
    assert before[0].weight_digest != core.weight_digest
    worker.order(Orders(keep_version=-1))
    wait_until(lambda: core.kept_version == -1, "the version that is kept")
    assert worker.evaluate(idle) == []


def test_a_lease_interrupts_an_evaluation_when_idle_and_changes_no_token(pair):
    _, worker = pair
    core = worker._core.worker
    on_loop(worker, lambda: None)
    version = core.policy_version
    request = dataclasses.replace(held_out(5, version), samples=16, sampling=SamplingSettings())
    expected, alone = worker.evaluate(request), rolled_out(worker, 6)
    worker.order(Orders(keep_version=version))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        idle = threads.submit(worker.evaluate, dataclasses.replace(request, when_idle=True))
        wait_until(lambda: core.evaluating or idle.done(), "the share to begin")
        between = rolled_out(worker, 6)
        assert idle.result(HANG_S) == expected
    worker.order(Orders(keep_version=-1))
    for one, other in zip(alone[0].completions, between[0].completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_timings_add_up_and_know_their_phases(pair):
    learner, worker = pair
    for actor in pair:
        actor.take_timing()
    version = worker._core.worker.policy_version
    worker.evaluate(held_out(2, version))
    timing = worker.take_timing().seconds
    assert timing["eval"] > 0 and timing["decode"] == 0, "an evaluation is booked as one"
    assert learner.take_timing().seconds["idle"] > 0


def test_groups_come_one_by_one_while_others_are_decoded_and_who_leaves_ends_them(pair):
    _, worker = pair
    core = worker._core.worker

    def run():
        every = {group.group_id: group for group in complete(core, *range(8))}
        assert sorted(every) == [f"g{i:08d}" for i in range(8)]
        groups = complete(core, *range(8))
        first = next(groups)
        assert core._engine.pending, "the rest is still to be decoded"
        groups.close()
        assert not core._engine.pending
        return first, every

    first, every = on_loop(worker, run)
    for one, other in zip(first.completions, every[first.group_id].completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
    assert [c.sample_index for c in first.completions] == list(range(G))


class LateScorers:
    """Scorers that are never done while something is left to decode."""

    def __init__(self, expected):
        self._expected = expected
        self.submitted = 0

    def submit(self, requests):
        self.submitted += len(requests)
        return LateScores(self, len(requests))

    @property
    def done(self):
        return self.submitted == self._expected


class LateScores:
    def __init__(self, scorers, count):
        self._scorers = scorers
        self._count = count

    @property
    def done(self):
        return self._scorers.done

    def wait_done(self, timeout_s):
        self.wait()

    def wait(self):
        assert self.done, "waited for scores instead of decoding on"
        return [Score({}, 1.0, "")] * self._count


def test_an_engine_that_fails_reports_its_own_error(pair, monkeypatch):
    """Not by what follows from it, and its worker decodes again once it was given a policy."""
    learner, worker = pair
    core = worker._core.worker
    (before,) = rolled_out(worker, 6)

    def run():
        with monkeypatch.context() as patch:
            patch.setattr(core._engine.device, "segment", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(complete(core, 6))
        current = worker._loop._fetcher._pull(
            core.policy_version, [learner.describe().address], 5.0
        )
        core.swap_policy(current.manifest, current.named)
        return list(complete(core, 6))

    (after,) = on_loop(worker, run)
    for one, other in zip(after.completions, before.completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert one.finish_reason is other.finish_reason


def test_slow_scorers_do_not_hold_up_decoding(pair, monkeypatch):
    _, worker = pair
    core = worker._core.worker
    monkeypatch.setattr(core, "_rewards", LateScorers(expected=8 * G))
    assert len(rolled_out(worker, *range(8))) == 8


def test_a_stop_string_ends_a_completion_and_stays_in_its_text(model, authority, pair):
    learner, _ = pair
    settings = dict(
        prompts_per_step=2,
        completions_per_prompt=G,
        max_prompt_tokens=192,
        max_completion_tokens=32,
        stop_strings=("e", "7"),
        decode=DecodeConfig(slots=8, compute_dtype="float32"),
    )
    address = learner.describe().address
    worker = make_worker(model, authority, address, rollout=RolloutConfig(**settings))
    try:
        for group in rolled_out(worker, 0, 1, 2, 3):
            for completion in group.completions:
                text = worker._core.worker._tokenizer.decode_completion(completion.token_ids)
                assert not {"e", "7"} & set(text[:-1])
                if completion.finish_reason is FinishReason.LENGTH:
                    assert not {"e", "7"} & set(text)
                elif completion.token_ids[-1] not in worker._core.worker._tokenizer.stop_ids:
                    assert text[-1] in "e7"
    finally:
        worker.close()


def damaged(manifest, named, kind):
    """A transfer that arrived wrong in one of several ways."""
    name = manifest.tensors[0].name
    tensors = {key: np.array(value) for key, value in named.items()}
    if kind == "missing":
        del tensors[name]
    elif kind == "misshapen":
        tensors[name] = tensors[name][:-1]
    elif kind == "extra":
        tensors["model.surplus.weight"] = tensors[name]
    else:
        tensors[name].reshape(-1).view(np.uint8)[0] ^= 1
    return tensors


@pytest.mark.parametrize("kind", ["missing", "misshapen", "extra", "flipped bit"])
def test_a_swap_that_fails_leaves_the_old_version_whole(pair, kind):
    learner, worker = pair
    core = worker._core.worker
    version, digest = core.policy_version, core.weight_digest
    before = rolled_out(worker, 5)
    current = worker._loop._fetcher._pull(version, [learner.describe().address], 5.0)
    manifest, named = current.manifest, current.named
    newer = dataclasses.replace(manifest, policy_version=version + 1)

    def run():
        with pytest.raises((ValueError, WeightDigestMismatch)):
            core.swap_policy(newer, damaged(manifest, named, kind))

    on_loop(worker, run)
    assert (core.policy_version, core.weight_digest) == (version, digest)
    after = rolled_out(worker, 5)
    assert after[0].policy_version == version
    for one, other in zip(before[0].completions, after[0].completions, strict=True):
        np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)


def test_after_a_swap_a_used_worker_equals_a_fresh_one(pair, model, authority):
    learner, worker = pair
    version = worker._core.worker.policy_version
    fresh = make_worker(model, authority, learner.describe().address)
    try:
        on_loop(fresh, lambda: None, version)
        assert fresh._core.worker.weight_digest == worker._core.worker.weight_digest
        mine, theirs = rolled_out(worker, 6), rolled_out(fresh, 6)
    finally:
        fresh.close()
    for one, other in zip(mine[0].completions, theirs[0].completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)


def test_a_learner_that_is_gone_is_named_and_the_worker_stays_whole(model, authority, tmp_path):
    learner = make_learner(model, authority, tmp_path)
    worker = make_worker(model, authority, learner.describe().address, timeout_s=5.0)
    learner.publish()
    on_loop(worker, lambda: None)
    learner.close()
    with pytest.raises(TimeoutError, match=learner.describe().address):
        on_loop(worker, lambda: None, version=1)
    with pytest.raises(BackgroundFailed, match="policy version >= 1, held is 0"):
        worker.news(0.0)
    assert worker._core.worker.policy_version == 0
    worker.close()


def test_a_group_of_unfinished_numbers_changes_nothing_and_is_kept(model, authority, tmp_path):
    recorded = tmp_path / "rollouts.bin"
    learner = make_learner(model, authority, tmp_path, rollouts_file=str(recorded))
    worker = make_worker(model, authority, learner.describe().address)
    learner.publish()
    rollout(worker, leases(0))
    poisoned = jax.tree.map(lambda leaf: leaf * np.nan, learner._learner._core.state.params)
    before = learner._learner._core.named_weights("float32")
    learner._learner._core._state = dataclasses.replace(
        learner._learner._core.state, params=poisoned
    )
    report = learner.update(["g00000000"], [], 5.0)
    assert report.metrics["train/update_skipped"] == 1.0
    kept = list((tmp_path / "rejected").glob("*.jsonl"))
    assert len(kept) == 1 and "g00000000" in kept[0].read_text()
    contents = scan_rollouts(recorded)
    groups = [group for place in contents.places for group in read_groups(recorded, place)]
    assert [group.group_id for group in groups] == ["g00000000"]
    assert contents.header.valid_vocab == 259 and contents.header.model_path == str(model)
    assert before.keys() == learner._learner._core.named_weights("float32").keys()
    worker.close()
    learner.close()
