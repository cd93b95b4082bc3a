"""For every alert: what raises it, what does not, and that a single step does neither."""

import math

import pytest

from diagnosis.judgement.alerts.alerts import RULES, Alerts
from tests.diagnosis.judgement.step_facts import settings, step

GB = 1e9


def run(steps, with_settings=None) -> Alerts:
    alerts = Alerts(with_settings or settings())
    for facts in steps:
        alerts.add_step(facts)
    return alerts


def habit(count=12, **facts):
    """Steps that are all alike."""
    return [step(n, **facts) for n in range(1, count + 1)]


def then(first, second, count=12, **facts):
    """Healthy steps, or others, and after them steps that are all alike."""
    return [*first, *(step(len(first) + n, **second, **facts) for n in range(1, count + 1))]


def text(alerts: Alerts, name: str) -> str:
    return alerts.standing[name].finding.text


def growing(first_gb, each_gb, count=60):
    name = "mem/rollout-0/host_bytes"
    return [step(n, metrics={name: (first_gb + each_gb * n) * GB}) for n in range(1, count + 1)]


WAITING = {"forward_backward": 1.0, "queue_wait": 0.4, "idle": 0.6}
BUSY_WORKERS = [{"decode": 1.7, "compile": 0.1}, {"decode": 1.7}]
SPIKE = [*habit(20), step(21, metrics={"train/grad_norm": 50.0}), step(22)]
COLLAPSE = then(habit(), {"metrics": {"train/entropy": 0.01}})
LEARNED = then(habit(), {"metrics": {"train/entropy": 0.01, "reward/total/mean": 0.95}})
SLOWER = then(habit(), {"wall_s": 4.0, "learner": {"forward_backward": 3.0}})
HALF_SPEED = then(habit(), {"metrics": {"throughput/train/decode_tokens_per_s": 200.0}})
FALLEN = then(habit(15), {"metrics": {"reward/total/mean": 0.2}})
STALE = [
    step(n, metrics={"groups/dropped_stale": 2.0 * n}, groups={"trained": 16}) for n in range(12)
]
RESTARTED = [*habit(), step(13, metrics={"workers/restarts": 1.0})]
RESTARTED[0:12] = [step(n, metrics={"workers/restarts": 0.0}) for n in range(1, 13)]
REFUSED = [step(n, metrics={"groups/unknown_receipt": 0.0}) for n in range(6)]
REFUSED.append(step(6, metrics={"groups/unknown_receipt": 3.0}))
SAVING = [step(n, learner={"forward_backward": 1.0, "checkpoint": 0.3}) for n in range(1, 31)]
EVALUATING = [step(n, metrics={"time/eval_s": 1.0 * (n % 2)}) for n in range(1, 41)]
EVALUATING_MUCH = [step(n, metrics={"time/eval_s": 1.4 * (n % 2)}) for n in range(1, 41)]

RAISED = {
    "learner_waits": (habit(learner=WAITING), "the learner waits 50 % of the step for rollouts"),
    "workers_wait": (
        habit(learner={"forward_backward": 1.8}, workers=[{"decode": 0.2}] * 2),
        "even the busiest worker waits 90 % of the step for the learner",
    ),
    "compiles": (
        habit(workers=BUSY_WORKERS),
        "rollout-0 compiled in 10 of the last 10 steps, 5.0 % of their time",
    ),
    "unexplained": (
        habit(learner={"forward_backward": 1.0, "unexplained": 0.3}),
        "15 % of the time of learner belongs to no phase; log.unexplained_fraction allows 5.0 %",
    ),
    "weights": (
        habit(workers=[{"decode": 0.5, "weights_swap": 0.2, "weights_wait": 0.3}]),
        "moving weights takes 25 % of the step of the busiest worker",
    ),
    "zero_variance": (
        habit(metrics={"rollout/zero_variance_fraction": 0.6}),
        "60 % of the groups have equal rewards and no learning signal",
    ),
    "truncated": (
        habit(metrics={"rollout/truncated_fraction": 0.3}),
        "30 % of the completions are cut off at 40 tokens",
    ),
    "aborted": (habit(metrics={"rollout/aborted_fraction": 0.2}), "20 % of the completions"),
    "reward_errors": (
        habit(metrics={"reward_error/fraction": 0.02}),
        "2.0 % of the completions could not be scored",
    ),
    "disagreement": (
        habit(metrics={"reward/gsm8k_answer/disagreement": 0.25}),
        "gsm8k_answer: strict and lenient parser disagree on 25 %",
    ),
    "entropy": (COLLAPSE, "entropy fell to 3.3 % of its first value (0.01 nats a token)"),
    "reward_fell": (FALLEN, "the reward fell from 0.5 to 0.2 within the last 27 steps"),
    "grad_norm": (SPIKE, "the gradient norm jumped to 50; the usual value is 1"),
    "nonfinite": ([step(1, metrics={"train/loss": math.nan})], "not finite in the last 1 steps: "),
    "skipped": ([step(1, metrics={"train/update_skipped": 1.0})], "1 of the last 1 steps made no"),
    "clipped": (
        habit(metrics={"train/clip_fraction_low": 0.1, "train/clip_fraction_high": 0.25}),
        "35 % of the tokens are clipped (10 % below, 25 % above)",
    ),
    "logprob_gap": (
        habit(metrics={"offpolicy/logprob_gap_mean": 0.05}),
        "learner and sampler differ by 0.05 nats a token; below 0.02 is usual",
    ),
    "canary": (habit(metrics={"canary/gap_max": 0.4}), "0.4 nats apart, 0.1 are allowed"),
    "stale": (STALE, "18 groups of the last 10 steps were too old to train on, 10 % of all"),
    "receipts": (REFUSED, "the learner refused 3 groups of the last 7 steps"),
    "ledger": (
        habit(workers=[{"decode": 2.2, "idle": 0.0}, {"decode": 0.9}]),
        "the phases of rollout-0 are 10 % off its wall time",
    ),
    "restarts": (RESTARTED, "restarts in the last 10 steps: workers 1"),
    "set_aside": (
        habit(metrics={"rollout/prompts_set_aside": 2.0}),
        "2 prompts are set aside and train no more",
    ),
    "slow_worker": (
        habit(workers=[{"decode": 0.4}, {"decode": 1.0}, {"decode": 0.4}]),
        "rollout-1 is busy 50 % of the step, the other workers 20 %",
    ),
    "step_time": (
        SLOWER,
        "4.00 s, 2.0 times the 2.00 s expected for its tokens (baseline: step 2 and later)",
    ),
    "throughput": (
        HALF_SPEED,
        "200 tokens/s; 500 are expected for this number of tokens (baseline: step 2",
    ),
    "saving": (SAVING, "checkpoints take 15 % of the last 30 steps"),
    "evaluating": (EVALUATING_MUCH, "evaluations take 35 % of the last 40 steps"),
    "memory": (growing(1.0, 0.02), "host memory of rollout-0 grew from 1.16 to 2.06 GB"),
}
SILENT = {
    "learner_waits": habit(learner={"forward_backward": 1.3, "queue_wait": 0.7}),
    "workers_wait": habit(),
    "compiles": [*habit(6, workers=BUSY_WORKERS[:1] * 2)[:2], *habit(12)],
    "unexplained": habit(learner={"forward_backward": 1.0, "unexplained": 0.08}),
    "weights": habit(
        workers=[{"decode": 0.5, "weights_wait": 0.9}], metrics={"weights/pull_s_max": 0.1}
    ),
    "zero_variance": habit(metrics={"rollout/zero_variance_fraction": 0.48}),
    "truncated": habit(metrics={"rollout/truncated_fraction": 0.18}),
    "aborted": habit(metrics={"rollout/aborted_fraction": 0.04}),
    "reward_errors": habit(metrics={"reward_error/fraction": 0.008}),
    "disagreement": habit(metrics={"reward/gsm8k_answer/disagreement": 0.1}),
    "entropy": LEARNED,
    "reward_fell": then(habit(15), {"metrics": {"reward/total/mean": 0.35}}),
    "grad_norm": [*habit(20), step(21, metrics={"train/grad_norm": 8.0})],
    "nonfinite": habit(),
    "skipped": habit(metrics={"train/update_skipped": 0.0}),
    "clipped": habit(metrics={"train/clip_fraction_low": 0.1, "train/clip_fraction_high": 0.1}),
    "logprob_gap": habit(
        metrics={"offpolicy/logprob_gap_mean": 0.05, "offpolicy/staleness_mean": 0.5}
    ),
    "canary": habit(metrics={"canary/gap_max": 1e-6}),
    "stale": habit(metrics={"groups/dropped_stale": 40.0}, groups={"trained": 16}),
    "receipts": habit(metrics={"groups/unknown_receipt": 3.0}),
    "ledger": habit(workers=[{"decode": 2.02, "idle": 0.0}, {"decode": 0.9}]),
    "restarts": habit(metrics={"workers/restarts": 2.0}),
    "set_aside": habit(metrics={"rollout/prompts_set_aside": 0.0}),
    "slow_worker": habit(workers=[{"decode": 0.15}, {"decode": 0.3}]),
    "step_time": then(habit(), {"wall_s": 2.6, "learner": {"forward_backward": 1.6}}),
    "throughput": then(habit(), {"metrics": {"throughput/train/decode_tokens_per_s": 400.0}}),
    "saving": [*habit(29), step(30, learner={"forward_backward": 1.0, "checkpoint": 1.0})],
    "evaluating": [*EVALUATING[:20], *habit(30)],
    "memory": [*growing(1.0, 0.05, 10), *growing(1.5, 0.0, 50)],
}


@pytest.mark.parametrize("name", RULES)
def test_an_alert_is_raised_with_its_numbers_and_an_advice(name):
    steps, expected = RAISED[name]
    alerts = run(steps)
    assert expected in text(alerts, name)
    finding = alerts.standing[name].finding
    assert len(finding.advice) > 20 and finding.severity in ("bad", "warn", "info")


@pytest.mark.parametrize("name", RULES)
def test_an_alert_stays_silent(name):
    assert name not in run(SILENT[name]).standing


def test_a_healthy_run_has_no_alert():
    assert not run(habit(150)).standing


WINDOWED = [
    "learner_waits",
    "workers_wait",
    "compiles",
    "unexplained",
    "weights",
    "zero_variance",
    "truncated",
    "clipped",
    "logprob_gap",
    "disagreement",
    "slow_worker",
    "step_time",
    "throughput",
    "entropy",
]


@pytest.mark.parametrize("name", WINDOWED)
def test_one_noisy_step_raises_nothing(name):
    bad_step = RAISED[name][0][-1]
    assert name not in run([*habit(20), bad_step, *habit(3)]).standing


def test_an_alert_stands_until_its_number_is_well_below_the_threshold():
    """On above 50 %, off below 45 %: 47 % raises nothing, and takes nothing back."""

    def share(value):
        return {"metrics": {"rollout/zero_variance_fraction": value}}

    assert "zero_variance" not in run(habit(30, **share(0.47))).standing
    raised = habit(12, **share(0.6))
    assert "zero_variance" in run(then(raised, share(0.47), 30)).standing
    assert "zero_variance" not in run(then(raised, share(0.40), 30)).standing


@pytest.mark.parametrize(
    "rewards, said, advised",
    [
        ((0.01, 0.0, 1.0), "almost every reward is the lowest, 0", "data.system_prompt"),
        ((0.95, 0.0, 1.0), "almost every reward is the highest, 1", "harder prompts"),
        ((1.0, 1.0, 1.0), "every reward is 1", "read samples"),
        ((0.5, 0.0, 1.0), "no learning signal", "more completions a prompt"),
    ],
)
def test_advice_on_equal_rewards_fits_what_they_are(rewards, said, advised):
    names = [f"reward/total/{name}" for name in ("mean", "min", "max")]
    metrics = {"rollout/zero_variance_fraction": 0.8, **dict(zip(names, rewards, strict=True))}
    finding = run(habit(metrics=metrics)).standing["zero_variance"].finding
    assert finding.text.endswith(said) and advised in finding.advice


def test_an_alert_says_since_when_it_stands_and_is_sorted_by_weight():
    steps = then(habit(8), {"metrics": {"rollout/zero_variance_fraction": 0.6}}, 12)
    steps = [*steps, step(21, metrics={"train/loss": math.inf})]
    found = run(steps).all(0.0, running=False)
    assert [(alert["id"], alert["severity"]) for alert in found] == [
        ("nonfinite", "bad"),
        ("zero_variance", "warn"),
    ]
    assert found[1]["since_step"] == 14  # the sixth of the last ten steps: the median is above
    assert found[0]["view"] == "trust" and "train/loss" in found[0]["text"]


def test_a_run_without_a_step_for_long_raises_an_alert_once_one_is_overdue():
    alerts = run(habit(10))  # 2 s a step; the last was closed at 1020
    assert not alerts.all(1070.0, running=True)
    (found,) = alerts.all(1090.0, running=True)
    assert (found["id"], found["severity"]) == ("no_step", "warn")
    assert found["text"] == "no step for 70 s; a step usually takes 2.0 s"
    assert alerts.all(2000.0, running=True)[0]["severity"] == "bad"
    assert not alerts.all(2000.0, running=False)


def test_a_slow_run_has_the_time_that_its_steps_usually_take():
    slow = run(
        habit(10, wall_s=100.0, learner={"forward_backward": 70.0}, workers=[{"decode": 29.0}])
    )
    assert not slow.all(1020.0 + 400.0, running=True)
    assert slow.all(1020.0 + 600.0, running=True)


def test_one_long_step_has_shown_how_long_a_step_may_take():
    alerts = run([*habit(9), step(10, wall_s=100.0)])  # closed at 1020
    assert not alerts.all(1020.0 + 149.0, running=True)
    assert alerts.all(1020.0 + 151.0, running=True)


@pytest.mark.parametrize(
    "name, steps, severity",
    [
        ("restarts", [step(n, metrics={"learner/restarts": n // 2.0}) for n in (1, 2)], "bad"),
        ("logprob_gap", habit(metrics={"offpolicy/logprob_gap_mean": 0.11}), "bad"),
        ("logprob_gap", habit(metrics={"offpolicy/logprob_gap_mean": 0.09}), "warn"),
        ("reward_errors", habit(metrics={"reward_error/fraction": 0.11}), "bad"),
        ("zero_variance", habit(metrics={"rollout/zero_variance_fraction": 0.91}), "bad"),
        ("skipped", habit(3, metrics={"train/update_skipped": 1.0}), "bad"),
    ],
)
def test_what_is_far_beyond_is_bad(name, steps, severity):
    assert run(steps).standing[name].finding.severity == severity


def test_the_advice_on_skipped_updates_tells_its_two_causes_apart():
    empty = step(1, metrics={"train/update_skipped": 1.0})
    broken = step(2, metrics={"train/update_skipped": 1.0, "train/loss": math.nan})

    def advice(*steps):
        return run(steps).standing["skipped"].finding.advice

    assert "left to train on" in advice(empty) and "rejected/" not in advice(empty)
    assert "rejected/" in advice(broken) and "left to train on" not in advice(broken)
    assert "left to train on" in advice(empty, broken) and "rejected/" in advice(empty, broken)


def test_the_first_entropy_is_of_steps_that_did_not_compile():
    compiling = habit(12, learner={"compile": 1.0}, metrics={"train/entropy": 4.0})
    assert "entropy" not in run(then(compiling, {}, 24)).standing


def test_a_reward_that_hardly_rose_has_not_bought_the_entropy():
    hardly = {"train/entropy": 0.01, "reward/total/mean": 0.6}  # a fifth of a deviation more
    assert "entropy" in run(then(habit(), {"metrics": hardly})).standing


def test_groups_that_came_too_late_count_like_those_that_grew_too_old():
    steps = [step(n, metrics={"groups/stale": 2.0 * n}, groups={"trained": 16}) for n in range(12)]
    assert "18 groups" in text(run(steps), "stale")


def test_a_jump_of_the_gradient_norm_is_of_the_last_five_steps():
    assert "grad_norm" in run([*SPIKE, *habit(3)]).standing
    assert "grad_norm" not in run([*SPIKE, *habit(4)]).standing


def test_a_reward_that_was_once_not_finite_can_still_fall():
    odd = step(1, metrics={"reward/total/mean": math.nan})
    assert "reward_fell" in run([odd, *FALLEN]).standing


def test_memory_that_grows_little_or_only_at_its_peak_is_no_leak():
    assert "memory" not in run(growing(10.0, 0.01)).standing  # 450 MB of 10 GB
    name = "mem/rollout-0/device_peak_bytes"
    peak = [step(n, metrics={name: (1.0 + 0.02 * n) * GB}) for n in range(1, 61)]
    assert "memory" not in run(peak).standing


def test_how_long_workers_may_wait_depends_on_the_mode():
    """They wait 65 % of the step."""
    steps = habit(
        learner={"forward_backward": 1.8}, workers=[{"decode": 0.7}] * 2
    )  # they wait 65 %
    assert "workers_wait" not in run(steps).standing
    assert "workers_wait" in run(steps, settings(max_staleness=1)).standing
    one = habit(learner={"forward_backward": 1.8}, workers=[{"decode": 0.2}])
    assert "workers_wait" not in run(one, settings(colocated=True)).standing


def test_advice_on_equal_rewards_names_the_setting_only_where_it_is_not_used():
    steps = habit(metrics={"rollout/zero_variance_fraction": 0.8})
    assert "=mask" in run(steps).standing["zero_variance"].finding.advice
    masked = run(steps, settings(zero_variance="mask")).standing["zero_variance"]
    assert "=mask" not in masked.finding.advice


@pytest.mark.parametrize("advantage", ["gae", "batch_norm"])
def test_equal_rewards_are_no_alert_where_groups_are_not_compared(advantage):
    steps = habit(metrics={"rollout/zero_variance_fraction": 1.0})
    assert "zero_variance" not in run(steps, settings(advantage=advantage)).standing


def test_a_new_worker_is_not_called_slow():
    steps = habit(12, workers=[{"decode": 1.0}, {"idle": 2.0}])
    assert "slow_worker" not in run(steps).standing


def test_advice_for_a_waiting_learner_fits_the_mode():
    synchronous = run(habit(learner=WAITING))
    assert (
        "raise rollout.max_staleness so that"
        in synchronous.standing["learner_waits"].finding.advice
    )
    asynchronous = run(habit(learner=WAITING), settings(max_staleness=1))
    assert "(1 now)" in asynchronous.standing["learner_waits"].finding.advice
    colocated = run(habit(learner=WAITING), settings(colocated=True))
    assert "separate" in colocated.standing["learner_waits"].finding.advice
