"""Does an asynchronous step take as long as its longer half: `python -m deploy.overlap`.

Three real runs of the demo's model on this machine, each `python -m driver` with a Ray head of its
own. The first finds how long an update takes; in the others scoring a group takes as long, so that
rollout and update are of equal length. A scorer that waits uses no core: what is measured is
whether the two sides wait for each other, and not how a machine of few cores shares them.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
UPDATES = 20
"""Optimiser updates on each batch, which make the learner's half long."""
WARM_UP = 3
"""Steps that are not counted: programs compile, and the pipeline fills."""
CONFIG = """
run: {{name: overlap, steps: {steps}, output_dir: {folder}}}
model: {{path: deploy/demo/model}}
data: {{train: {{source: "reasoning_gym:chain_sum", size: 512}}}}
rollout:
  workers: 1
  prompts_per_step: 4
  completions_per_prompt: 4
  max_prompt_tokens: 96
  max_completion_tokens: 24
  max_staleness: {staleness}
  decode: {{slots: 16}}
reward:
  functions: [{{name: "benchmarks.overlap:score", params: {{seconds: {seconds}}}}}]
  processes: 16
  timeout_s: 120
learner: {{microbatch_tokens: 512, updates_per_batch: {updates}}}
checkpoint: {{every_steps: 0, export_hf: false}}
eval: {{at_start: false, at_end: false}}
placement: {{platform: cpu, learner: {{cpus: 0.5}}, rollout: {{cpus: 0.5}}}}
"""


def score(completion: str, *, answer: str, prompt: str, item: dict, seconds: float) -> float:
    """A scorer that waits, as one that asks a judge over the network does."""
    time.sleep(seconds)
    return len(set(completion)) / 32.0


def measured_steps(
    folder: pathlib.Path, *, steps: int, staleness: int, seconds: float
) -> list[dict]:
    """One run; returns the metrics of its steps beyond the warm-up."""
    out = folder / f"staleness-{staleness}-{seconds:.2f}"
    config = folder / f"{out.name}.yaml"
    config.write_text(
        CONFIG.format(
            steps=steps, folder=out, staleness=staleness, seconds=seconds, updates=UPDATES
        )
    )
    print(f"a run of {steps} steps with max_staleness {staleness} ...", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "driver", "--config", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}:\n{done.stdout}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP:]


def median(lines: list[dict], name: str) -> float:
    """Of one metric over the steps."""
    return statistics.median(line[name] for line in lines)


def main() -> int:
    """Returns 0 if the asynchronous step is within the bound."""
    parser = argparse.ArgumentParser(prog="python -m deploy.overlap", description=__doc__)
    parser.add_argument("--steps", type=int, default=13, help="of each measured run")
    parser.add_argument("--bound", type=float, default=1.15, help="of the ratio")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        update_s = median(
            measured_steps(folder, steps=WARM_UP + 3, staleness=0, seconds=0.1),
            "time/train/update_s",
        )
        synchronous = measured_steps(folder, steps=given.steps, staleness=0, seconds=update_s)
        asynchronous = measured_steps(folder, steps=given.steps, staleness=1, seconds=update_s)
    phases = {
        "rollout": median(synchronous, "time/train/rollout_generate_s"),
        "update": median(synchronous, "time/train/update_s"),
    }
    step_s = median(asynchronous, "time/train/step_s")
    ratio = step_s / max(phases.values())
    staleness = max(line["offpolicy/staleness_max"] for line in asynchronous)
    print(f"synchronous   rollout {phases['rollout']:.2f} s, update {phases['update']:.2f} s, step "
          f"{median(synchronous, 'time/train/step_s'):.2f} s")  # fmt: skip
    print(f"asynchronous  step {step_s:.2f} s, staleness at most {staleness:.0f}")
    print(f"overlap: {ratio:.2f}x of the longer phase, bound {given.bound:g}, medians of "
          f"{len(asynchronous)} steps")  # fmt: skip
    return int(ratio > given.bound)


if __name__ == "__main__":
    sys.exit(main())
