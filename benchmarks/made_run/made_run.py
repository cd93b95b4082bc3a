"""Writes the output folder of a made-up run, with the files of a real run of that size.

    python -m benchmarks.made_run.made_run DIR --steps 10000 --workers 8
    python -m benchmarks.made_run.made_run DIR --steps 60 --workers 1 --workers-to 3 --live 1

`--live S` writes one step every S seconds, as a run does; without it all steps are written at once.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import socket
import sys
import time
import zipfile
from collections.abc import Mapping
from typing import Any

from benchmarks.made_run.made_steps import (
    COMPLETIONS,
    RunPlan,
    Step,
    first_step,
    make_step,
    without_holes,
)
from benchmarks.made_run.made_texts import HOSTILE, evaluation, samples
from driver.accounting.jsonl import strict_line
from driver.config.yaml_text import dump_yaml
from services.process.phases import PHASES
from services.process.whole_file import write_whole

STARTED = 1_795_000_000.0
"""Unix seconds at which a run that is written at once has started."""
CODE = {
    "learner/objective/loss.py": '"""The loss."""\n\n\ndef clip(x, low, high):\n    return x\n',
    "driver/run.py": '"""The step loop."""\n\nSTEPS = 40\n',
    "proto/tandem/v1/control.proto": 'syntax = "proto3";\n',
}


class MadeRun:
    """Owns the folder of one made-up run, and writes it step by step.

    Args:
        folder: is made where it does not exist.
        plan: what to make up.
        started: Unix seconds.
        config: changes of the configuration by dotted key.
        code: changes of files in code.zip by name.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        plan: RunPlan,
        *,
        started: float = STARTED,
        config: Mapping[str, Any] | None = None,
        code: Mapping[str, str] | None = None,
    ):
        self.folder = folder
        self.plan = plan
        self.step = -1
        """The last one that was written."""
        self._now = started
        self._leases = 0
        folder.mkdir(parents=True, exist_ok=True)
        name = f"made{HOSTILE[0]}" if plan.hostile else "made"
        self._status: dict[str, Any] = {
            "run": name,
            "run_id": "made-00000001",
            "state": "running",
            "exit_code": None,
            "reason": "",
            "step": 0,
            "last_checkpoint": None,
            "started": started,
            "ended": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._write_status()
        settings = configuration(plan, name, config or {})
        (folder / "config.yaml").write_text(dump_yaml(settings), encoding="utf-8")
        (folder / "run_id").write_text("made-00000001\n", encoding="utf-8")
        environment = {
            "versions": {"jax": "0.10.2", "numpy": "2.2.0", "ray": "2.60.0"},
            "python": platform.python_version(),
            "platform": "Linux-x86_64",
            "cpus": 2,
            "commit": None,
            "dirty": None,
        }
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        _write_code(folder / "code.zip", CODE | dict(code or {}))
        self._files = {
            name: (folder / f"{name}.jsonl").open("a", encoding="utf-8")
            for name in ("metrics", "ledger", "timeline", "samples", "eval")
        }

    def write_step(self) -> Step:
        """Writes the next step, the first one being step 0, and returns it."""
        number = self.step + 1
        step = make_step(self.plan, number) if number else first_step(self.plan)
        start, self._now = self._now, self._now + step.wall_s
        if number:
            for record in samples(self.plan, number, step.accuracy):
                self._write("samples", record)
            self._write_raw_surrogate(number)
        if number in (0, self.plan.steps):
            for record in evaluation(self.plan, number, step.accuracy):
                self._write("eval", record)
        rows = step.seconds()
        self._write_ledger(step, rows)
        self._write_metrics(step, rows)
        if self.plan.timeline:
            self._write_timeline(step, start)
        for file in self._files.values():
            file.flush()
        self.step = number
        return step

    def progress(self, pid: int | None = None) -> None:
        """Says in status.json how far the run is; a pid is that of another driver."""
        kept = [s for s in (self.step // 20 * 20,) if s]
        self._status |= {"step": self.step, "last_checkpoint": kept[-1] if kept else None}
        self._status |= {"pid": pid} if pid is not None else {}
        self._write_status()

    def end(self, state: str = "finished", reason: str = "") -> None:
        """Says in status.json how the run ended: finished, failed, interrupted or still running."""
        codes = {"finished": 0, "failed": 1, "interrupted": 130, "running": None}
        ended = None if state == "running" else self._now
        self._status |= {"state": state, "exit_code": codes[state], "reason": reason}
        self._status |= {"ended": ended}
        self.progress()
        for file in self._files.values():
            file.close()

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(strict_line(record) + "\n")

    def _write_raw_surrogate(self, number: int) -> None:
        """A line with a JSON escape that is no character, as other programs may write it."""
        if self.plan.hostile and number == 1:
            record = next(samples(self.plan, number, 0.5)) | {"completion": "\ud800 lone"}
            self._files["samples"].write(json.dumps(record) + "\n")

    def _write_ledger(self, step: Step, rows: dict[str, dict[str, float]]) -> None:
        first = step.step * 16
        groups = {"trained": [f"g{first + i:08d}" for i in range(16)]} if step.step else {}
        record = {
            "step": step.step,
            "wall_s": step.wall_s,
            "processes": rows,
            "overlap_s": {"learner": 0.004} if step.step == 0 else {},
            "absent_s": {"rollout-0": 0.002} if step.step == 0 else {},
            "groups": groups,
            "outstanding": 16 if self.plan.max_staleness else 0,
            "warnings": [f"step 1: {HOSTILE[1]}"] if self.plan.hostile and step.step == 1 else [],
        }
        self._files["ledger"].write(json.dumps(record) + "\n")

    def _write_metrics(self, step: Step, rows: dict[str, dict[str, float]]) -> None:
        self._leases += 16 if step.step else 0
        metrics = step.metrics | {"time/train/step_s": step.wall_s}
        metrics |= {"leases/done": float(self._leases), "leases/returned": 0.0}
        metrics |= {"leases/expired": 0.0, "leases/out": 0.0}
        if step.step:
            metrics["time/train/step_avg_last10_s"] = step.wall_s
        if self.plan.hostile:
            metrics[f"reward/{HOSTILE[0]}/mean"] = 0.5
        for process, row in rows.items():
            metrics |= {f"time/{process}/{phase}_s": s for phase, s in row.items() if s > 0}
        self._write("metrics", {"step": step.step, "time": self._now, **metrics})

    def _write_timeline(self, step: Step, start: float) -> None:
        processes = {}
        for process, spans in step.spans.items():
            rows = [
                [PHASES.index(name), round(t, 4), round(s, 4)]
                for name, t, s in without_holes(spans, step.wall_s)
            ]
            marks = [
                [round(t + s, 4), f"version {max(0, step.step - (process != 'learner'))}"]
                for name, t, s in spans
                if name in ("weights_swap", "publish")
            ]
            marks += [
                [round(t + s, 4), f"checkpoint {step.step}"]
                for name, t, s in spans
                if name == "checkpoint"
            ]
            processes[process] = {"spans": rows, "marks": marks}
        count = max(1, min(60, int(step.wall_s / 0.4)))
        gauges = [
            [round(i * step.wall_s / count, 4), (i * 7) % 17, 16 - (i * 7) % 17, step.step]
            for i in range(count)
        ]
        record = {
            "step": step.step,
            "start": round(start, 4),
            "end": round(start + step.wall_s, 4),
            "processes": processes,
            "gauges": gauges,
        }
        self._files["timeline"].write(json.dumps(record) + "\n")

    def _write_status(self) -> None:
        write_whole(self.folder / "status.json", json.dumps(self._status))


def make_run(
    folder: pathlib.Path,
    steps: int = 40,
    workers: int = 2,
    seed: int = 0,
    state: str = "finished",
    nonfinite: bool = False,
    hostile: bool = False,
    *,
    config: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
    **plan: Any,
) -> MadeRun:
    """Writes a whole run: step 0 and `steps` more.

    Args:
        state: finished, failed, interrupted, or running (of this process, which lives).
        config: changes of the configuration by dotted key.
        code: changes of files in code.zip by name.
        plan: further fields of RunPlan.
    """
    chosen = RunPlan(
        steps=steps, workers=workers, seed=seed, nonfinite=nonfinite, hostile=hostile, **plan
    )
    run = MadeRun(folder, chosen, config=config, code=code)
    for _ in range(steps + 1):
        run.write_step()
    reasons = {"failed": "RuntimeError: made up", "interrupted": "interrupted by SIGINT"}
    reason = reasons.get(state, "")
    run.end(state, reason + (HOSTILE[1] if hostile and reason else ""))
    return run


def configuration(plan: RunPlan, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.yaml that the dashboard reads."""
    most = max(plan.workers, plan.workers_to or 0)
    elastic = {"min": 1, "max": most, "policy": "fixed"}
    config: dict[str, Any] = {
        "run": {"name": name, "steps": plan.steps, "seed": plan.seed, "output_dir": "runs/made"},
        "model": {"path": "deploy/demo/model"},
        "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 2048}},
        "rollout": {
            "workers": plan.workers if plan.workers_to is None else elastic,
            "prompts_per_step": 16,
            "completions_per_prompt": COMPLETIONS // 16,
            "max_prompt_tokens": 40,
            "max_completion_tokens": 40,
            "max_staleness": plan.max_staleness,
            "decode": {"slots": 64},
        },
        "reward": {"functions": [{"name": "gsm8k_answer", "weight": 1.0, "params": {}}]},
        "algorithm": {"kl_coef": 0.0, "zero_variance": "keep"},
        "learner": {"optimizer": {"name": "adamw", "learning_rate": 3e-5}},
        "log": {"samples_per_step": plan.samples_per_step, "unexplained_fraction": 0.05},
        "placement": {"mode": "separate", "platform": "cpu"},
    }
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        here = config
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return config


def _write_code(path: pathlib.Path, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", "--workers-from", type=int, default=2)
    parser.add_argument("--workers-to", type=int)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part-at", type=int)
    parser.add_argument("--flat-from", type=int)
    parser.add_argument("--nonfinite", action="store_true")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--no-timeline", dest="timeline", action="store_false")
    parser.add_argument("--no-tokens", dest="tokens", action="store_false")
    parser.add_argument("--state", default="finished", help="how it ends; running: it does not")
    parser.add_argument("--live", type=float, help="seconds a step; default: all at once")
    return parser.parse_args()


def main() -> None:
    """Writes the run that the command line describes."""
    arguments = _arguments()
    names = {field.name for field in dataclasses.fields(RunPlan)}
    plan = RunPlan(**{name: value for name, value in vars(arguments).items() if name in names})
    if list(arguments.folder.glob("*.jsonl")):
        sys.exit(f"{arguments.folder} already has a run: choose another folder")
    started = STARTED if arguments.live is None else time.time()
    run = MadeRun(arguments.folder, plan, started=started)
    for _ in range(plan.steps + 1):
        run.write_step()
        if arguments.live is not None:
            run.progress()
            time.sleep(arguments.live)
    run.end(arguments.state)


if __name__ == "__main__":
    main()
