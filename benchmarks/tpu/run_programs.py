"""Compiles all programs of a run for TPU v6e chips, without a TPU, and checks that they fit.

    make tpu-check
    python -m deploy.tpu_check --config deploy/runs/gsm8k_qwen25_3b_v6e8.yaml --json check.json

The functions are those that the service runs, at the shapes of the run's longest sequences, and
the compiler is the chip's own: it finds tilings that do not exist and memory that does not
suffice. Needs jax[tpu] and neither a TPU nor weights; nothing is executed, so there are no times.
Exits with 1 when a program does not compile or does not fit, and with 2 when the arguments are
wrong.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.tpu.compile_kernel import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # libtpu reads it when it starts

import jax
from jax.experimental import topologies

from benchmarks.compiled_program import accessed_bytes, program_sizes
from benchmarks.decode.model_shapes import SHAPES
from benchmarks.report_file import check_report_file, write_report
from benchmarks.tpu.memory_fit import HEADER, V6E_USABLE_BYTES, RunProgram, table_row, verdict
from driver.config.load_config import ConfigError, load
from driver.config.plan import Plan, asked_devices, derive
from driver.config.run_config import RunConfig
from learner.compiled_functions import LearnerFunctions, make_learner_functions
from learner.config import AlgorithmConfig, TrainingSettings
from learner.objective.off_policy import Correction
from learner.publish.snapshot import PUBLISH_DTYPES
from learner.update.host_memory import on_devices
from learner.update.sharding import named_shardings
from learner.update.value_head import policy_params
from models.adapter import join
from models.config import ModelConfig
from models.files.checkpoint import read_model_config
from models.files.hf_config import from_hf
from models.transformer import Params, abstract_params
from rollout_worker.engine.decode_programs import device_bytes
from rollout_worker.engine_setup import EngineSetup

REFERENCE_RUN = "deploy/runs/gsm8k_qwen25_3b_v6e8.yaml"
QWEN25_3B = SHAPES["qwen2.5-3b"]
"""Qwen2.5-3B-Instruct, the model of the reference run."""
CHIP_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""The part of a v6e host that a process sees, by the number of its chips."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    usable_bytes = round(arguments.usable_gib * 2**30)
    try:
        check_report_file(arguments.json)
        config = load(arguments.config, arguments.set)
        model = _model(arguments.model_config, arguments.layers)
        _require_tpu_run(config)
        plan = derive(config, model, asked_devices(config), _teacher(config, model))
    except (ConfigError, ValueError, OSError) as error:
        print(f"tpu_check: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.config}: {model.model_type}, {model.num_layers} layers, "
        f"{plan.parameters:,} parameters; GB of each chip\n{HEADER}",
        flush=True,
    )
    programs = []
    for role in arguments.role or ROLES:
        for program in ROLES[role](config, model, plan):
            programs.append(program)
            print(table_row(program), flush=True)
    fits, text = verdict(programs, usable_bytes)
    print(text)
    if arguments.json:
        report = {
            "config": arguments.config,
            "model": dataclasses.asdict(model),
            "jax": jax.__version__,
            "usable_bytes": usable_bytes,
            "fits": fits,
            "programs": [
                {**dataclasses.asdict(one), "need_bytes": one.need_bytes} for one in programs
            ],
        }
        write_report(report, arguments.json)
    return 0 if fits else 1


def learner_programs(config: RunConfig, model: ModelConfig, plan: Plan) -> Iterator[RunProgram]:
    """`empty`, `accumulate` and `apply` of one update, on micro-batches of the longest rows,
    `score` where the objective needs logprobs or values before it, and `snapshot` and `canary` of
    a publication. Frozen models are the base of an adapter, the reference policy and the teacher.

    An update is counted with two snapshots beside it, as if publications were slow.
    """
    programs = make_learner_functions(
        abstract_params(model),
        model,
        TrainingSettings(
            algorithm=config.algorithm,
            learner=config.learner,
            total_steps=config.run.steps,
            temperature=config.rollout.temperature,
            valid_vocab=_valid_vocab(model),
            max_completion_tokens=config.rollout.max_completion_tokens,
        ),
        devices=topology_devices(plan.devices.learner),
        teacher=_teacher(config, model),
    )
    state = programs.abstract_state
    trained = policy_params(state.params)
    algorithm, dtype = config.algorithm, jax.numpy.dtype(config.learner.compute_dtype)
    base, reference = _base(programs, model, dtype), None
    whole = lambda params: params if base is None else join(base, params)
    policy = whole(trained)
    if algorithm.kl_coef > 0 and base is not None:
        lora = config.learner.lora
        reference = policy if lora is not None and lora.init_from is not None else base
    elif algorithm.kl_coef > 0:
        reference = jax.tree.map(lambda leaf: _struct(leaf, dtype=dtype), policy)
    teacher = None
    if (teacher_plan := programs.teacher) is not None:
        teacher = jax.tree.map(
            lambda leaf, at: _struct(leaf, dtype=config.learner.compute_dtype, sharding=at),
            abstract_params(teacher_plan.config),
            named_shardings(programs.mesh, teacher_plan.specs),
        )
    frozen_bytes = device_bytes((reference if base is None else base, teacher))
    moments_bytes = device_bytes(state.opt_state)
    wire = config.weights.dtype
    published = jax.tree.map(lambda leaf: _struct(leaf, dtype=PUBLISH_DTYPES[wire]), trained)
    snapshot_bytes = device_bytes(published)
    compile_ = functools.partial(compile_program, "learner")

    program, empty = compile_(
        "empty",
        lambda: _compiled(programs.empty, state.params),
        beside="state, frozen models and two snapshots",
        beside_bytes=device_bytes(state) + frozen_bytes + 2 * snapshot_bytes,
    )
    yield program
    if empty is None:
        return
    accumulator = outputs(empty)
    batch = programs.batch_shapes(plan.microbatch_rows, plan.row_tokens)
    in_reward, in_loss = algorithm.kl_in == "reward", algorithm.teacher_in_loss
    of_loss = None if in_reward else reference, teacher if in_loss else None
    idle_bytes = frozen_bytes - device_bytes((of_loss[0] if base is None else base, of_loss[1]))
    coef = None if state.entropy_bonus is None else state.entropy_bonus.coef
    given = (state.params, of_loss[0], accumulator, batch, coef, of_loss[1], base)
    yield compile_(
        "accumulate",
        lambda: _compiled(programs.accumulate, *given),
        beside="optimiser moments, two snapshots" + ", frozen models" * bool(idle_bytes),
        beside_bytes=moments_bytes + 2 * snapshot_bytes + idle_bytes,
    )[0]
    if programs.has_critic:
        yield compile_(
            "score of the critic",
            lambda: _compiled(programs.score_values, whole(state.params), batch.tokens_only),
            beside="optimiser moments, frozen models and two snapshots",
            beside_bytes=moments_bytes + frozen_bytes + 2 * snapshot_bytes,
        )[0]
    before = algorithm.ratio == "sequence" or _corrects(algorithm)
    scored = [
        ("score", programs.score, policy, before),
        ("score of the reference", programs.score_reference, reference, in_reward),
        ("score of the teacher", programs.score_teacher, teacher, teacher and not in_loss),
    ]
    for name, score, params, _ in filter(lambda one: one[3], scored):
        others = device_bytes(state) + frozen_bytes - device_bytes(params)
        yield compile_(
            name,
            functools.partial(_compiled, score, params, batch.tokens_only),
            beside="the rest of state and frozen models, and two snapshots",
            beside_bytes=others + 2 * snapshot_bytes,
        )[0]
    denominator = jax.ShapeDtypeStruct((), jax.numpy.float32)
    yield compile_(
        "apply",
        lambda: _compiled(programs.apply, on_devices(state), accumulator, denominator),
        beside="frozen models and two snapshots",
        beside_bytes=frozen_bytes + 2 * snapshot_bytes,
    )[0]
    yield compile_(
        "snapshot",
        lambda: _compiled(programs.snapshots[wire], trained),
        beside="optimiser moments, frozen models and an older snapshot",
        beside_bytes=moments_bytes + frozen_bytes + snapshot_bytes,
    )[0]
    yield compile_(
        "canary",
        lambda: _compiled(programs.canaries[wire], policy),
        beside="optimiser moments, frozen models and two snapshots",
        beside_bytes=moments_bytes + frozen_bytes + 2 * snapshot_bytes,
    )[0]


def _base(programs: LearnerFunctions, model: ModelConfig, dtype: jax.numpy.dtype) -> Params | None:
    """The model under an adapter, if one trains."""
    if programs.base is None:
        return None
    return jax.tree.map(
        lambda leaf, at: _struct(leaf, dtype=dtype, sharding=at),
        abstract_params(model),
        named_shardings(programs.mesh, programs.base.specs),
    )


def _teacher(config: RunConfig, model: ModelConfig) -> ModelConfig | None:
    """Of the distillation, if any, with the model's rows of the vocabulary.

    Raises:
        ValueError: if there is none where the configuration says.
    """
    distillation = config.algorithm.distillation
    if distillation is None:
        return None
    teacher = read_model_config(distillation.teacher)
    return dataclasses.replace(teacher, vocab_size=model.vocab_size)


def _corrects(algorithm: AlgorithmConfig) -> bool:
    return Correction(**algorithm.off_policy.model_dump()).is_on


def worker_programs(config: RunConfig, model: ModelConfig, plan: Plan) -> Iterator[RunProgram]:
    """The decode engine's programs at their largest: the longest prefill chunks, a segment over
    the widest cache, and the widening to it.

    Each is counted with a second policy beside it, as if a version could arrive at any time; only
    `empty` runs after the older one is freed.
    """
    setup = EngineSetup(
        rollout=config.rollout,
        model=model,
        platform=config.placement.platform,
        weights_dtype=config.weights.dtype,
        adapter=plan.adapter,
    )
    mesh = setup.mesh(topology_devices(plan.devices.worker))
    programs = setup.programs(mesh, valid_vocab=_valid_vocab(model))
    sizes = programs.geometry
    policy_bytes = device_bytes(programs.params_struct())
    version_bytes = plan.worker.version_bytes  # of an adapter where one trains
    slot_bytes = device_bytes(programs.slots_struct(sizes.widths[-1]))
    compile_ = functools.partial(compile_program, "worker")
    yield compile_("empty", programs.compile_empty, beside="a policy", beside_bytes=policy_bytes)[0]
    for later in (False, True)[: 1 + sizes.has_later_chunks]:
        yield compile_(
            "prefill, later" if later else "prefill",
            functools.partial(programs.compile_prefill, sizes.chunks[-1], later=later),
            beside="slots and a second policy",
            beside_bytes=slot_bytes + version_bytes,
        )[0]
    yield compile_(
        "segment",
        functools.partial(programs.compile_segment, sizes.widths[-1]),
        beside="a second policy",
        beside_bytes=version_bytes,
    )[0]
    if len(sizes.widths) > 1:
        yield compile_(
            "resize",
            functools.partial(programs.compile_resize, *sizes.widths[-2:]),
            beside="prefilled prompts and two policies",
            beside_bytes=device_bytes(programs.pool_struct()) + policy_bytes + version_bytes,
        )[0]


ROLES = {"learner": learner_programs, "worker": worker_programs}


def compile_program(
    role: str,
    name: str,
    compile_: Callable[[], jax.stages.Compiled],
    *,
    beside: str,
    beside_bytes: int,
) -> tuple[RunProgram, jax.stages.Compiled | None]:
    """Compiles one program and reads its sizes; None where the compiler refuses."""
    started = time.monotonic()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        return RunProgram(
            role=role, name=name, compile_s=time.monotonic() - started, error=str(error)
        ), None
    compile_s, sizes = time.monotonic() - started, program_sizes(compiled)
    program = RunProgram(
        role=role,
        name=name,
        compile_s=compile_s,
        peak_bytes=sizes["peak_bytes"],
        argument_bytes=sizes["argument_bytes"],
        output_bytes=sizes["output_bytes"],
        temp_bytes=sizes["temp_bytes"],
        accessed_bytes=accessed_bytes(compiled),
        beside=beside,
        beside_bytes=beside_bytes,
    )
    return program, compiled


def _compiled(jitted: Any, *arguments: Any) -> jax.stages.Compiled:
    return jitted.lower(*arguments).compile()


def outputs(compiled: jax.stages.Compiled):
    """Shape, dtype and sharding of what a program returns: arguments of the next one."""
    return jax.tree.map(
        lambda out, sharding: _struct(out, sharding=sharding),
        compiled.out_info,
        compiled.output_shardings,
    )


def topology_devices(count: int) -> list[jax.Device]:
    """The chips of a process that has `count` of a v6e host, for the compiler only."""
    bounds = CHIP_BOUNDS[count]
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"v6e:{bounds[0]}x{bounds[1]}",
        chips_per_host_bounds=bounds,
    )
    return list(topology.devices)


def _struct(leaf, *, dtype=None, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding or leaf.sharding)


def _valid_vocab(model: ModelConfig) -> int:
    """Stands for the tokenizer's size; below the embedding's, so that the mask is compiled."""
    return model.vocab_size - 1


def _model(path: str | None, layers: int | None) -> ModelConfig:
    model = QWEN25_3B
    if path is not None:
        model = from_hf(json.loads(pathlib.Path(path).read_text()))
    return model if layers is None else dataclasses.replace(model, num_layers=layers)


def _require_tpu_run(config: RunConfig) -> None:
    """Refuses what cannot be compiled here; sizes that cannot work at all are derive's to refuse.

    Raises:
        ConfigError: with value, rule and fix.
    """
    if config.placement.platform != "tpu":
        raise ConfigError(
            f"placement.platform={config.placement.platform}: only runs on tpu can be checked"
        )
    asked = asked_devices(config)
    for role, count in (("learner", asked.learner), ("worker", asked.worker)):
        if count not in CHIP_BOUNDS:
            raise ConfigError(
                f"{count} TPU chips for the {role}: a process can have {sorted(CHIP_BOUNDS)} of a "
                "v6e host; change placement"
            )
    if config.rollout.decode.loop != "while":
        raise ConfigError(
            f"rollout.decode.loop={config.rollout.decode.loop}: only `while` is one program to "
            "check"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu, the compiler, is not installed: pip install '.[tpu]'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.tpu_check",
        description="Compile a run's programs for TPU v6e without a TPU, and say if they fit.",
    )
    parser.add_argument("--config", default=REFERENCE_RUN, help="run to check (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as python -m driver"
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="config.json of the run's model; without it Qwen2.5-3B-Instruct is assumed",
    )
    parser.add_argument(
        "--role", action="append", choices=ROLES, help="check this one; may be given twice"
    )
    parser.add_argument("--layers", type=int, help="cut the model to its first LAYERS layers")
    parser.add_argument(
        "--usable-gib",
        type=float,
        default=V6E_USABLE_BYTES / 2**30,
        help="memory of a chip that programs may use (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
