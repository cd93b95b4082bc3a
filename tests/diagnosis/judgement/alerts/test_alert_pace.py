"""Step time and tokens a second are compared with similar steps; the alerts come and go."""

import itertools

from diagnosis.judgement.alerts.alerts import Alerts
from tests.diagnosis.judgement.step_facts import settings, step

TIMES = ("step_time", "throughput")


def paced(count, *, workers=2, wall_s=2.0, tokens=1000.0, per_s=500.0, first=1):
    metrics = {"rollout/tokens": tokens, "throughput/train/decode_tokens_per_s": per_s}
    rows = [{"decode": 0.3 * wall_s}] * workers
    learner = {"forward_backward": 0.65 * wall_s}
    return [
        step(first + n, wall_s=wall_s, learner=learner, workers=rows, metrics=metrics)
        for n in range(count)
    ]


def followed(*parts) -> Alerts:
    alerts = Alerts(settings())
    for facts in itertools.chain(*parts):
        alerts.add_step(facts)
    return alerts


def standing(*parts) -> set[str]:
    return set(followed(*parts).standing)


def test_what_takes_longer_says_which_phase_grew_most():
    alerts = followed(paced(12), paced(12, wall_s=6.0, first=13))
    advice = alerts.standing["step_time"].finding.advice
    assert advice.startswith("update on the critical path grew most, by 2.60 s")


def test_more_tokens_a_step_explain_a_longer_one_and_fewer_a_lower_rate():
    longer = paced(12, wall_s=4.0, tokens=2000.0, first=13)
    assert not standing(paced(12), longer)
    assert standing(paced(12), paced(12, wall_s=4.0, tokens=1200.0, first=13)) == {"step_time"}
    shorter = paced(12, tokens=400.0, per_s=220.0, first=13)
    assert not standing(paced(12), shorter)
    assert standing(paced(12), paced(12, tokens=900.0, per_s=220.0, first=13)) == {"throughput"}
    # Seconds that do not go with the tokens stay: a step of half as many may take as long.
    assert not standing(paced(12), paced(12, tokens=500.0, first=13))


def test_a_slow_stretch_is_taken_back_when_the_number_is_back():
    slow = paced(12, wall_s=4.0, per_s=200.0, first=13)
    assert standing(paced(12), slow) == set(TIMES)
    assert standing(paced(12), slow, paced(5, first=25)) == set(TIMES)
    assert not standing(paced(12), slow, paced(6, first=25))
    # Well below where it was raised, and not only below: 1.4 times, 70 %.
    half = paced(20, wall_s=2.8, per_s=350.0, first=25)
    assert standing(paced(12), slow, half) == set(TIMES)
    assert not standing(paced(12), half)


def test_another_number_of_workers_has_a_baseline_of_its_own():
    fewer = paced(30, workers=1, wall_s=4.0, per_s=200.0, first=13)
    for count in range(1, 31):
        assert not standing(paced(12), fewer[:count]) & set(TIMES), count
    slow = paced(12, workers=1, wall_s=8.0, per_s=100.0, first=43)
    assert standing(paced(12), fewer, slow) >= set(TIMES)


def test_steps_with_a_worker_lost_are_not_compared_with_those_with_all():
    """Every other step has lost one, so that none settles with the workers that are left."""
    odd = [
        facts
        for n in range(13, 33, 2)
        for facts in (
            *paced(1, workers=1, wall_s=5.0, per_s=100.0, first=n),
            *paced(1, first=n + 1),
        )
    ]
    assert not standing(paced(12), odd) & set(TIMES)
    assert not standing(paced(12), odd[:-1]) & set(TIMES)
