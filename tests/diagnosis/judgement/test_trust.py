"""Each light of the Trust view: when it is green, when it is not, and when there is none."""

import math

import pytest

from diagnosis.judgement.recent import Recent, percent
from diagnosis.judgement.trust import CHECKS, trust
from tests.diagnosis.judgement.step_facts import settings, step


def lights(metrics=(), *, steps=10, with_settings=None, **facts):
    recent = Recent(
        [step(n, metrics=dict(metrics), **facts) for n in range(1, steps + 1)],
        with_settings or settings(),
    )
    return {check.id: check for check in trust(recent)}


@pytest.mark.parametrize(
    "check, name, ok, warn, bad",
    [
        ("logprob_gap", "offpolicy/logprob_gap_mean", 0.01, 0.03, 0.2),
        ("weights_raw", "offpolicy/is_weight_raw_mean", 1.01, 0.9, 1.5),
        ("weights_truncated", "offpolicy/token_share_truncated", 0.01, 0.1, 0.5),
        ("zero_variance", "rollout/zero_variance_fraction", 0.5, 0.6, 0.95),
        ("reward_errors", "reward_error/fraction", 0.0, 0.02, 0.2),
        ("disagreement", "reward/gsm8k_answer/disagreement", 0.02, 0.1, 0.4),
        ("canary", "canary/gap_max", 0.0, 0.06, 0.2),
    ],
)
def test_lights_follow_their_bounds(check, name, ok, warn, bad):
    assert lights({name: ok})[check].light == "ok"
    assert lights({name: warn})[check].light == "warn"
    assert lights({name: bad})[check].light == "bad"
    assert lights({name: ok})[check].series[0].startswith(name.split("/")[0])


@pytest.mark.parametrize(
    "check", ["logprob_gap", "weights_raw", "weights_truncated", "disagreement", "canary"]
)
def test_what_was_not_measured_has_no_light(check):
    gone = ("offpolicy/logprob_gap_mean", "reward/gsm8k_answer/disagreement")
    found = lights(without=gone)[check]
    assert (found.light, found.value) == ("none", None)
    assert "nan" not in found.text


def test_one_noisy_step_does_not_switch_a_light():
    steps = [step(n, metrics={"offpolicy/logprob_gap_mean": 1e-6}) for n in range(9)]
    steps.append(step(9, metrics={"offpolicy/logprob_gap_mean": 3.0}))
    checks = {check.id: check for check in trust(Recent(steps, settings()))}
    assert checks["logprob_gap"].light == "ok"


def test_stale_groups_may_be_further_from_the_policy():
    gap = {"offpolicy/logprob_gap_mean": 0.05}
    assert lights(gap)["logprob_gap"].light == "warn"
    assert lights(gap | {"offpolicy/staleness_mean": 1.0})["logprob_gap"].light == "ok"


def test_staleness_beyond_the_promise_is_bad():
    allowed = settings(max_staleness=1)
    assert lights({"offpolicy/staleness_max": 1.0}, with_settings=allowed)["staleness"].light == (
        "ok"
    )
    found = lights({"offpolicy/staleness_max": 2.0}, with_settings=allowed)["staleness"]
    assert found.light == "bad" and "allows 1" in found.text


def test_the_canary_is_held_against_the_bound_of_the_run():
    found = lights({"canary/gap_max": 0.06}, with_settings=settings(canary_bound=0.05))["canary"]
    assert (found.light, found.bound) == ("bad", 0.025)


def test_phases_that_claim_more_than_the_step_show():
    found = lights(workers=[{"decode": 2.03, "idle": 0.0}])["ledger"]
    assert found.light == "warn" and found.value == pytest.approx(0.015)
    assert "rollout-0" in found.text
    assert lights(workers=[{"decode": 2.2, "idle": 0.0}])["ledger"].light == "bad"
    assert lights()["ledger"].light == "ok"


def test_a_process_that_was_not_there_leaves_no_gap_in_the_sum():
    gone = {"workers": [{"decode": 0.5, "idle": 0.0}], "absent_s": {"rollout-0": 1.5}}
    assert lights(**gone)["ledger"].light == "ok"
    assert lights(**gone | {"absent_s": {}})["ledger"].light == "bad"


def test_more_leases_than_groups_means_that_a_group_got_lost():
    assert lights({"leases/out": 3.0}, outstanding=5)["leases"].light == "ok"
    assert lights({"leases/out": 3.0}, outstanding=2)["leases"].light == "bad"


def test_unknown_receipts_warn_and_many_new_ones_are_bad():
    assert lights({"groups/unknown_receipt": 0.0})["receipts"].light == "ok"
    assert lights({"groups/unknown_receipt": 4.0})["receipts"].light == "warn"
    rising = [step(n, metrics={"groups/unknown_receipt": 8.0 * n}) for n in range(10)]
    checks = {check.id: check for check in trust(Recent(rising, settings()))}
    assert checks["receipts"].light == "bad"


def test_masked_tokens_count_like_truncated_ones():
    shares = {"offpolicy/token_share_truncated": 0.03, "offpolicy/token_share_masked": 0.04}
    found = lights(shares)["weights_truncated"]
    assert found.light == "warn" and found.value == pytest.approx(0.07)


def test_one_group_that_is_too_old_breaks_the_promise():
    steps = [step(n, metrics={"offpolicy/staleness_max": float(n == 5)}) for n in range(10)]
    checks = {check.id: check for check in trust(Recent(steps, settings()))}
    assert checks["staleness"].light == "bad"


def test_three_skipped_updates_are_a_habit():
    skips = [step(n, metrics={"train/update_skipped": float(n < 3)}) for n in range(10)]
    assert {c.id: c for c in trust(Recent(skips, settings()))}["updates"].light == "bad"
    two = {c.id: c for c in trust(Recent(skips[1:], settings()))}
    assert two["updates"].light == "warn"


def test_a_counter_that_starts_anew_has_not_fallen():
    counts = [7.0, 9.0, 0.0, 1.0]
    steps = [step(n, metrics={"workers/restarts": count}) for n, count in enumerate(counts)]
    assert Recent(steps, settings()).rise("workers/restarts") == 3.0


def test_shares_are_rounded_as_the_page_does():
    assert [percent(x) for x in (0.125, 0.62499, 0.0825, 0.0)] == ["13 %", "62 %", "8.3 %", "0 %"]


def test_skipped_updates_and_numbers_that_are_not_finite_are_named():
    nan = {"train/loss": math.nan, "train/update_skipped": 1.0}
    steps = [*(step(n) for n in range(9)), step(9, metrics=nan)]
    checks = {check.id: check for check in trust(Recent(steps, settings()))}
    assert checks["updates"].light == "warn" and checks["updates"].value == 1
    assert checks["nonfinite"].light == "bad" and "train/loss" in checks["nonfinite"].text
    assert lights()["nonfinite"].light == "ok"


def test_every_bound_has_its_reason_written_down():
    assert all(check.__doc__ and len(check.__doc__) > 60 for check in CHECKS)
