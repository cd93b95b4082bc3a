"""What an evaluation beside training costs a step: `python -m benchmarks.evaluation_cost`.

Pairs of real runs of the demo's model, each `python -m driver` with a Ray head of its own: one with
evaluations beside training, one without any, in turns. The learner's half of a step is the longer
one, so that the worker has time to spare, which the evaluations fill. Learner and worker have a
core each (`--share-cores` leaves that out): on accelerators they would not compete for one either.

The same steps of a pair are compared: the median of their ratios, and the ratio of their sums,
which would also show a cost that only some of the steps have.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP = 4
"""Steps that are not counted: programs compile, and the pipeline fills."""
READY = re.compile(r"^(\S+) is (?:ready|back): .* process (\d+) on ")
CONFIG = """
run: {{name: evaluation, steps: {steps}, output_dir: {folder}}}
model: {{path: deploy/demo/model}}
data:
  train: {{source: "reasoning_gym:chain_sum", size: 512}}
  eval: {{source: "reasoning_gym:chain_sum", size: {prompts}, seed: 999}}
rollout:
  workers: 1
  prompts_per_step: 4
  completions_per_prompt: 4
  max_prompt_tokens: 96
  max_completion_tokens: 24
  max_staleness: 1
  decode: {{slots: 16, segment_tokens: 8}}
learner: {{microbatch_tokens: 512, updates_per_batch: {updates}}}
checkpoint: {{every_steps: 0, export_hf: false}}
eval: {{every_steps: {every}, at_start: false, at_end: false}}
log: {{dashboard: {{enabled: false}}}}
placement: {{platform: cpu, learner: {{cpus: 0.5}}, rollout: {{cpus: 0.5}}}}
"""


def pin(process: int, core: int) -> None:
    """Gives all threads of a process one core."""
    for thread in psutil.Process(process).threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread.id, {core})


def measured_steps(folder: pathlib.Path, given: argparse.Namespace, *, every: int) -> list[dict]:
    """One run; returns the metrics of its steps beyond the warm-up.

    Args:
        every: steps from one evaluation to the next; 0 for none.
    """
    config = folder / f"{len([*folder.iterdir()])}.yaml"
    out = config.with_suffix("")
    config.write_text(
        CONFIG.format(
            steps=given.steps + WARM_UP,
            folder=out,
            every=every,
            updates=given.updates,
            prompts=given.prompts,
        )
    )
    cores = sorted(os.sched_getaffinity(0))
    said = []
    with subprocess.Popen(
        [sys.executable, "-m", "driver", "--config", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            said.append(line)
            found = READY.match(line)
            if found and not given.share_cores and len(cores) > 1:
                pin(int(found[2]), cores[0] if found[1] == "learner" else cores[1])
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}:\n{''.join(said)}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] > WARM_UP]


def main() -> int:
    """Returns 0 if both ratios are within the bound."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=3, help="of runs")
    parser.add_argument("--steps", type=int, default=24, help="of each run that are compared")
    parser.add_argument("--every", type=int, default=3, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=32, help="of the held-out set")
    parser.add_argument("--updates", type=int, default=20, help="of the learner on each batch")
    parser.add_argument("--share-cores", action="store_true", help="pin no process to a core")
    parser.add_argument("--bound", type=float, default=1.02, help="of the ratios")
    given = parser.parse_args()
    ratios, with_s, without_s, waited_s, evaluations = [], [], [], 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        for pair in range(given.pairs):
            order = (given.every, 0) if pair % 2 == 0 else (0, given.every)
            runs = {e: measured_steps(pathlib.Path(name), given, every=e) for e in order}
            one, other = (
                [line["time/train/step_s"] for line in runs[every]] for every in (given.every, 0)
            )
            found = [a / b for a, b in zip(one, other, strict=True)]
            done = [line for line in runs[given.every] if "eval/step" in line]
            ratios, with_s, without_s = ratios + found, with_s + one, without_s + other
            evaluations += len(done)
            waited_s += sum(line["time/eval_s"] for line in done)
            print(
                f"pair {pair + 1}: median of the ratios {statistics.median(found):.4f}, "
                f"{sum(one):.2f} s with {len(done)} evaluations, {sum(other):.2f} s without",
                flush=True,
            )
    median, total = statistics.median(ratios), sum(with_s) / sum(without_s)
    print(
        f"evaluation beside training: step x {median:.4f} (median of {len(ratios)} pairs of "
        f"steps), all steps x {total:.4f}, bound {given.bound:g}; {evaluations} evaluations of "
        f"{given.prompts} prompts, {waited_s:.2f} s waited for them"
    )
    return int(max(median, total) > given.bound)


if __name__ == "__main__":
    sys.exit(main())
