"""Whether the catalog knows and describes every name that a run writes."""

import pathlib
import re

import pytest

from diagnosis.catalog import catalog
from services.process.phases import PHASES

ROOT = pathlib.Path(__file__).parents[3]
WRITERS = (
    "driver/reports/evaluation.py",
    "driver/accounting/intake.py",
    "driver/accounting/run_spending.py",
    "driver/reports/step_report.py",
    "driver/session.py",
    "learner/recorded_learner.py",
    "learner/core.py",
    "learner/update/update_metrics.py",
    "learner/objective/off_policy.py",
    "learner/objective/gae.py",
    "learner/sft/supervised_learner.py",
    "driver/sft/sft_plan.py",
    "rollout_worker/environments/environment_use.py",
)
LIKELY = {
    "name": "gsm8k_answer",
    "variant": "strict",
    "k": "4",
    "n": "2",
    "process": "learner",
    "phase": "decode",
    "worker": "rollout-0",
    "thread": "fetch",
}
"""What may fill the places of a name in the code."""

NAMES = [
    "reward/gsm8k_answer/mean",
    "reward/gsm8k_answer/lenient/mean",
    "reward/my/own/mean",
    "reward/gsm8k_answer/disagreement",
    "reward/total/std",
    "eval/pass_at_1",
    "eval/pass_at_16",
    "eval/accuracy/lenient_high",
    "time/learner/forward_backward_s",
    "time/rollout-12/weights_swap_s",
    "time/rollout-0/background_fetch_s",
    "time/learner/unexplained_s",
    "time/train/update_s",
    "time/eval_s",
    "offpolicy/staleness_0",
    "offpolicy/staleness_17",
    "offpolicy/is_weight_kept_min",
    "offpolicy/logprob_gap_kept_sequence_max",
    "funnel/contributed",
    "mem/learner/host_bytes",
    "mem/rollout-3/device_peak_bytes",
    "queue/waiting_max",
    "queue/out_mean",
    "rollout/completion_len_p90",
    "rollout/tokens_beyond_half",
    "leases/expired",
    "groups/unknown_receipt",
    "canary/gap_max",
    "weights/gb_per_s",
    "leases/done",
    "groups/malformed",
    "train/kl",
    "mem/peak_bytes_in_use_max",
    "publish/waited_s",
    "checkpoint/blocked_s",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_name_is_known(name):
    assert catalog.find(name) is not None


@pytest.mark.parametrize("name", ["mine/own", "time/learner/lunch_s", "offpolicy/staleness_x", ""])
def test_other_names_are_unknown_and_charted(name):
    assert catalog.find(name) is None
    assert catalog.is_charted(name)


def test_an_exact_name_wins_over_a_pattern():
    found = catalog.find("reward/total/mean")
    assert found is not None and found.name == "reward/total/mean"
    found = catalog.find("time/train/step_s")
    assert found is not None and found.group == "step_time"


@pytest.mark.parametrize("path", WRITERS)
def test_every_name_in_the_code_that_writes_metrics_is_known(path):
    text = (ROOT / path).read_text()
    prefixes = {metric.name.split("/")[0] for metric in catalog.METRICS}
    texts = re.findall(r'f?"([a-z_]+/[^"\s]*)"', text)
    names = {
        re.sub(r"\{(\w+)\}", lambda part: LIKELY.get(part[1], part[0]), name)
        for name in texts
        if name.split("/")[0] in prefixes
        and not name.endswith(".jsonl")
        # Their other half stands elsewhere; NAMES has some of them.
        and not name.startswith(("offpolicy/{name}", "groups/{name}", "leases/{name}"))
    }
    assert names
    assert not {name for name in names if not catalog.find(name)}


def test_every_row_says_what_a_person_needs():
    names = [metric.name for metric in catalog.METRICS]
    assert len(names) == len(set(names))
    for metric in catalog.METRICS:
        assert metric.title and metric.description and metric.group, metric
        assert metric.view in ("breakdown", "timeline", "learning", "trust", "fleet"), metric


def test_every_phase_has_a_row():
    assert tuple(phase.name for phase in catalog.PHASE_ROWS) == PHASES


def test_the_page_gets_names_and_patterns_apart():
    answer = catalog.catalog_json()
    rows = {row.get("name", row.get("pattern")): row for row in answer["metrics"]}
    assert "pattern" in rows["mem/{process}/host_bytes"]
    assert rows["train/entropy"]["unit"] == "nats"
    assert answer["phases"][0]["name"] == "prefill"


def test_phase_seconds_are_not_loaded_with_the_page():
    assert catalog.charted(["time/learner/decode_s", "train/loss", "time/train/step_s"]) == [
        "train/loss",
        "time/train/step_s",
    ]
