"""How long a checkpoint stops the learner: `python -m benchmarks.checkpoint_stall`.

One state of AdamW, written in turns as `checkpoint.asynchronous: false` and `true` do it: hashed,
written, read back and put in place, in the calling thread or beside it. Printed are the medians of
the seconds in which the caller stood, of the write, and the median of the ratios of the pairs. In
the background nothing else runs here meanwhile; a training beside it slows both.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile

import jax
import numpy as np
import optax

from learner.durable.certificate import make_certificate
from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_writer import CheckpointJob, CheckpointWriter
from learner.durable.saved import Saved
from learner.update.mesh import make_mesh
from learner.update.sharding import param_specs
from learner.update.state import TrainState, init_state

SIDE = 1024
"""Rows and columns of one matrix: 4 MiB, and as much for each of its moments."""
WAIT_S = 3600.0


def make_state(megabytes: int) -> TrainState:
    """Weights and both moments, of about so many 10^6 bytes together, on one device."""
    count = max(1, round(megabytes * 1e6 / (3 * 4 * SIDE**2)))
    noise = np.random.default_rng(0).normal(size=(count, SIDE, SIDE)).astype(np.float32)
    params = {"layers": {"mlp": {"gate_proj": {"weight": noise}}}}
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    state = init_state(params, optax.adamw(1e-3), mesh, param_specs(params, 1))
    return jax.block_until_ready(state)


def measured(writer: CheckpointWriter, step: int, state: TrainState, *, beside: bool) -> Saved:
    """Writes one checkpoint, and returns once it is complete."""

    def job() -> CheckpointJob:
        return CheckpointJob(
            step=step,
            state=state,
            record={"step": step},
            certify=lambda state: make_certificate(state, seed=0, driver_state={}),
            scores={},
        )

    if beside:
        writer.submit(job)
        writer.wait()
    else:
        writer.write(job)
    (saved,) = writer.take_ended()
    assert not saved.problem, saved.problem
    return saved


def main() -> None:
    """Prints one line for each pair, and the medians."""
    parser = argparse.ArgumentParser(
        description="Measures how long a checkpoint stops the learner."
    )
    parser.add_argument("--mb", type=int, default=300, help="10^6 bytes of state (default: 300)")
    parser.add_argument("--pairs", type=int, default=7, help="of checkpoints (default: 7)")
    parser.add_argument("--folder", help="on the disk to measure (default: that of TMPDIR)")
    given = parser.parse_args()
    state = make_state(given.mb)
    stood: dict[bool, list[float]] = {False: [], True: []}
    wrote: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        checkpoints = CheckpointFolder(pathlib.Path(folder), keep=1)
        writer = CheckpointWriter(checkpoints, on_certified=lambda *_: [], timeout_s=WAIT_S)
        steps = itertools.count(1)
        for pair in range(given.pairs + 1):
            for beside in (False, True) if pair % 2 else (True, False):
                saved = measured(writer, next(steps), state, beside=beside)
                if pair == 0:
                    continue  # compiles what draws the certificate's numbers, and warms the disk
                stood[beside].append(saved.blocked_s)
                wrote[beside].append(saved.write_s)
            if pair:
                print(
                    f"pair {pair}: stood {stood[False][-1]:.3f} s, beside the training "
                    f"{stood[True][-1]:.3f} s",
                    flush=True,
                )
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    median = statistics.median
    ratio = median(now / before for before, now in zip(stood[False], stood[True], strict=True))
    print(
        f"checkpoint_stall: {nbytes / 1e6:.0f} MB, stood {median(stood[False]):.3f} s -> "
        f"{median(stood[True]):.3f} s, ratio {ratio:.3f}, write {median(wrote[False]):.3f} s -> "
        f"{median(wrote[True]):.3f} s"
    )


if __name__ == "__main__":
    main()
