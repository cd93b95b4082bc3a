"""Times of a step by the model, notes and JSON, of programs made by hand."""

import io
import json

import pytest
from rich.console import Console

from driver.chip_plan.compiled.collectives import WireTraffic
from driver.chip_plan.report import as_json, make_plan, print_plan, step_ms
from driver.chip_plan.run_program import RunProgram
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.topology import parse_topology
from driver.config.wording import say_bytes

OVERRIDES = (
    *("learner.microbatch_tokens=256", "learner.updates_per_batch=2", "rollout.workers=1"),
    *("rollout.prompts_per_step=6", "rollout.completions_per_prompt=8"),
    *("rollout.max_prompt_tokens=40", "rollout.max_completion_tokens=40"),
    *("rollout.decode.slots=16", "rollout.decode.segment_tokens=16"),
)


@pytest.fixture(scope="module")
def shape():
    """One layer of the demo's model on the CPU; a micro-batch has two rows of 128 tokens."""
    return request_of().shape()


def request_of(*more):
    return PlanRequest(
        path="deploy/runs/demo_cpu.yaml",
        overrides=(*OVERRIDES, *more),
        topology=parse_topology("cpu", 1.0),
        layers=1,
    )


def timed(role, name, ms, **more):
    return RunProgram(role=role, name=name, model_ms=ms, peak_bytes=1000, **more)


COMMAND = "python -m driver.plan --config 'my run.yaml' --topology cpu --search"
LEARNER = [
    timed("learner", "accumulate", 10.0, wires=(WireTraffic("all-gather", 36, 5_000_000),)),
    timed("learner", "apply", 3.0),
    timed("learner", "snapshot", 1.0),
    timed("learner", "canary", 0.5),
]
WORKER = [timed("worker", "prefill", 7.0), timed("worker", "segment", 20.0, open_loops=1)]


def test_a_step_of_the_learner_is_its_micro_batches_updates_and_the_publication(shape):
    # 48 rows of completions, 2 to a micro-batch, twice; an update each time.
    assert shape.plan.microbatches_per_update == 24
    assert step_ms(shape, LEARNER) == {"learner": 2 * (24 * 10 + 3) + 1 + 0.5}


def test_scores_before_the_update_count_once_for_each_micro_batch(shape):
    scored = [*LEARNER, timed("learner", "score of the reference", 2.0)]
    assert step_ms(shape, scored)["learner"] == 2 * (24 * 10 + 3) + 1.5 + 24 * 2


def test_shorter_rows_are_no_micro_batches_of_their_own(shape):
    more = [timed("learner", f"{name}, shorter rows", 99.0) for name in ("accumulate", "score")]
    assert step_ms(shape, [*LEARNER, *more]) == step_ms(shape, LEARNER)


def test_a_step_of_the_worker_is_its_segments_and_prefills(shape):
    # 48 completions in 16 slots take 3 rounds, each of 3 segments of 16 tokens for 40.
    geometry = shape.worker.programs.geometry
    calls = -(-6 // geometry.chunk_prompts(geometry.chunks[-1]))
    assert step_ms(shape, WORKER) == {"worker": 3 * 3 * 20 + calls * 7}


def test_without_rates_there_is_no_time(shape):
    assert step_ms(shape, [RunProgram(role="learner", name="accumulate")]) == {}


def test_the_report_says_what_is_a_model_and_what_it_leaves_out(shape):
    kernel = timed("learner", "accumulate", 10.0, unknown_work=("splash_mha",))
    plan = make_plan(COMMAND, request_of(), shape, [*LEARNER, *WORKER, kernel])
    printed = io.StringIO()
    print_plan(plan, Console(file=printed, width=160))
    text = printed.getvalue()
    assert "a step at the longest lengths (model, never measured): learner" in text
    assert "in worker segment there are loops whose rounds depend on the data" in text
    assert "the model time has no work of splash_mha, which state none" in text
    assert "all-gather" in text and "5.00 MB" in text
    found = json.loads(json.dumps(as_json(plan), allow_nan=False))
    assert found["programs"][0]["wires"] == {"all-gather": [36, 5_000_000]}
    assert found["step_model_ms_never_measured"]["learner"] == pytest.approx(487.5)
    assert found["command"] == COMMAND
    assert found["overrides"] == list(OVERRIDES)
    assert found["fits"] is True


def test_notes_name_what_the_verdict_does_not_count():
    request = request_of("rollout.stop_strings=[END]", "rollout.workers=2")
    plan = make_plan(COMMAND, request, request.shape(), [*LEARNER, *WORKER])
    host, stops, *_ = plan.notes
    total = sum(plan.host.learner.values()) + 2 * sum(plan.host.worker.values())
    assert f"the host memory of learner and 2 workers, at most {say_bytes(total)}, comes" in host
    assert "planned without rollout.stop_strings" in stops
    plain = request_of()
    notes = make_plan(COMMAND, plain, plain.shape(), LEARNER).notes
    assert not any("stop_strings" in note for note in notes)
