"""Times an update of the learner beside the same one in torch, on the CPU.

    python -m benchmarks.update.cli --model deploy/demo/model
    python -m benchmarks.update.cli --shape smollm2 --layers 4 --groups 4 --group 4

Both train the same model on the same random batch, each in a process of its own, and take turns;
the processor seconds beside the elapsed ones say what a busy machine did to them. The first updates
must have gradients of the same norm. Needs torch: `make .venv/.test` installs it.
"""

import argparse
import importlib.util
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decode.model_shapes import SHAPES
from benchmarks.report_file import aligned, check_report_file, versions, write_report
from benchmarks.update.work import Work
from driver.chip_plan.published_models import with_layers

SIDES = ("tandem", "torch")
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of the first gradients' norms."""
_ANSWER_S = 3600.0
"""For one update, the compiler's time included; far longer than any takes."""


class SideEnded(RuntimeError):
    """A process that was to make updates is gone."""


class Side:
    """One side, in a process of its own."""

    def __init__(self, name: str, work: Work):
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(name, work, other), daemon=True)
        self._process.start()
        other.close()

    def step(self) -> tuple[float, float, float]:
        """Seconds, processor seconds, and the gradient's norm of one update.

        Raises:
            SideEnded: if its process did; what it said last is on the terminal.
            TimeoutError: if no update takes so long.
        """
        try:
            self._pipe.send("step")
            if not self._pipe.poll(_ANSWER_S):
                raise TimeoutError(f"waited {_ANSWER_S:g} s for an update of {self.name}")
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            raise SideEnded(
                f"the process of {self.name} ended with exit code {self._process.exitcode}"
            ) from None

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _serve(name: str, work: Work, pipe: Any) -> None:
    if name == "torch":
        from benchmarks.update.in_torch import TorchUpdate as Update
    else:
        from benchmarks.update.ours import OurUpdate as Update
    update = Update(work)
    while pipe.recv() == "step":
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        norm = update.step()
        pipe.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s, norm))


def compare(work: Work, *, warmup: int, repeat: int) -> dict[str, Any]:
    """Updates of both sides in turn.

    Raises:
        ValueError: if the first gradients differ.
    """
    sides = [Side(name, work) for name in SIDES]
    try:
        norms = {side.name: side.step()[2] for side in sides}
        check_norms(norms, work.dtype)
        rounds = [[side.step()[:2] for side in sides] for _ in range(warmup + repeat)][warmup:]
    finally:
        for side in sides:
            side.end()
    tokens = work.rows * work.row_tokens
    found = {
        name: {
            "us_per_token": 1e6 * statistics.median(each[i][0] for each in rounds) / tokens,
            "cpu_us_per_token": 1e6 * statistics.median(each[i][1] for each in rounds) / tokens,
            "grad_norm": norms[name],
        }
        for i, name in enumerate(SIDES)
    }
    ratios = [ours[0] / theirs[0] for ours, theirs in rounds]
    return {"sides": found, "ratio": statistics.median(ratios), "ratios": ratios}


def check_norms(norms: Mapping[str, float], dtype: str) -> None:
    """Raises ValueError if the sides' first gradients are not of the same norm."""
    one, other = norms.values()
    if not abs(one - other) <= TOLERANCE[dtype] * other:
        raise ValueError(f"the norms of the first gradients differ: {dict(norms)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 where the arguments are wrong, a side failed or the gradients differ."""
    given = _parser().parse_args(argv)
    try:
        check_report_file(given.json)
        if importlib.util.find_spec("torch") is None:
            raise ValueError("torch is not installed: make .venv/.test installs it")
        with tempfile.TemporaryDirectory() as scratch:
            work = _work(given, pathlib.Path(scratch))
            found = compare(work, warmup=given.warmup, repeat=given.repeat)
    except (ValueError, SideEnded) as error:
        print(f"update: {error}", file=sys.stderr)
        return 2
    rows = [
        [name, f"{side['us_per_token']:.0f}", f"{side['cpu_us_per_token']:.0f}"]
        for name, side in found["sides"].items()
    ]
    text = [
        f"{work.rows} sequences of {work.row_tokens} tokens, {work.dtype}, "
        f"micro-batches of {work.microbatch_tokens} tokens, medians of {given.repeat} updates",
        *aligned([["", "us/token", "processor us/token"], *rows]),
        f"tandem / torch: {found['ratio']:.2f} (median of the pairs)",
    ]
    write_report(
        {"work": work._replace(model=str(work.model))._asdict(), "versions": versions()} | found,
        given.json,
        text,
    )
    return 0


def _work(given: argparse.Namespace, scratch: pathlib.Path) -> Work:
    if min(given.groups, given.group, given.prompt, given.completion, given.repeat) < 1:
        raise ValueError(
            "--groups, --group, --prompt, --completion and --repeat must be at least 1"
        )
    if given.warmup < 0:
        raise ValueError(f"--warmup {given.warmup} must be at least 0")
    if given.layers is not None and given.shape is None:
        raise ValueError(f"--layers {given.layers} cuts a --shape, and none is given: name one")
    if given.group < 2:
        raise ValueError(f"--group {given.group}: advantages need at least 2 completions")
    if given.microbatch < given.prompt + given.completion:
        raise ValueError(
            f"--microbatch {given.microbatch} cannot hold one sequence of "
            f"{given.prompt + given.completion} tokens: raise it"
        )
    model = given.model
    if given.shape is not None:
        model = _drawn(given.shape, given.layers, scratch)
    if not (pathlib.Path(model) / "config.json").is_file():
        raise ValueError(f"--model {model}: no HF folder, it has no config.json")
    return Work(
        model=pathlib.Path(model),
        dtype=given.dtype,
        groups=given.groups,
        group_size=given.group,
        prompt_tokens=given.prompt,
        completion_tokens=given.completion,
        microbatch_tokens=given.microbatch,
        learning_rate=given.lr,
        seed=given.seed,
    )


def _drawn(shape: str, layers: int | None, scratch: pathlib.Path) -> pathlib.Path:
    """A folder with random weights of a published model's sizes."""
    import jax

    from learner.publish.snapshot import host_weights
    from models.files.checkpoint import save_model
    from models.transformer import init_params

    config = with_layers(SHAPES[shape], layers)
    params = init_params(jax.random.key(0), config)
    folder = scratch / shape
    save_model(folder, config, host_weights(params, config, "float32"))
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update.cli",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="deploy/demo/model", help="HF folder (%(default)s)")
    which.add_argument("--shape", choices=sorted(SHAPES), help="random weights of these sizes")
    parser.add_argument("--layers", type=int, help="fewer layers of the shape")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=40, help="tokens of a completion")
    parser.add_argument("--microbatch", type=int, default=2048, help="tokens at once")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--warmup", type=int, default=2, help="updates that are not counted")
    parser.add_argument("--repeat", type=int, default=9, help="updates that are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file of the report; - prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
