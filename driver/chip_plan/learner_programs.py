"""The learner's programs, compiled for chips that this machine lacks.

They are those that the service runs, at the shapes of the run's largest micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from driver.chip_plan.run_program import Parts, PlannedProgram
from driver.config.plan import Plan
from driver.config.run_config import RunConfig
from learner.compiled_functions import LearnerFunctions, make_learner_functions
from learner.config import AlgorithmConfig, TrainingSettings
from learner.objective.batching import MicroBatch, row_buckets
from learner.objective.off_policy import Correction
from learner.publish.snapshot import PUBLISH_DTYPES
from learner.update.host_memory import on_devices
from learner.update.sharding import named_shardings
from learner.update.train_step import Accumulator
from learner.update.value_head import policy_params
from models.adapter import join
from models.config import ModelConfig
from models.transformer import Params, abstract_params
from rollout_worker.engine.decode_programs import device_bytes

PARAMETERS = "parameters"
MOMENTS = "optimiser state"
HOST_MOMENTS = "optimiser state on the host"
GRADIENTS = "gradients"
FROZEN = "frozen models"
SNAPSHOTS = "published snapshots"
SNAPSHOTS_AT_ONCE = 2
"""One that is being copied and one that waits (learner/publish/publisher.py)."""
SHORTER = ", shorter rows"
"""End of the name of a program at the row length whose micro-batches have the most slots, where
they have more than those of the longest rows."""
ACCUMULATE = "accumulate"
SCORE = "score"
SCORE_CRITIC, SCORE_REFERENCE, SCORE_TEACHER = (
    f"score of the {model}" for model in ("critic", "reference", "teacher")
)
SCORES = (SCORE_CRITIC, SCORE, SCORE_REFERENCE, SCORE_TEACHER)
OF_MICROBATCHES = frozenset(name + rows for name in (ACCUMULATE, *SCORES) for rows in ("", SHORTER))
"""Programs whose arguments are a micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerPrograms:
    """What the learner compiles, with the arrays that its programs take.

    Frozen models are the base of an adapter, the reference policy and the teacher.
    """

    config: RunConfig
    plan: Plan
    functions: LearnerFunctions
    base: Params | None
    reference: Params | None
    teacher: Params | None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: ModelConfig,
        plan: Plan,
        *,
        devices: Any,
        teacher: ModelConfig | None,
    ) -> "LearnerPrograms":
        """Builds the functions; nothing is compiled yet.

        Args:
            devices: of the learner.
            teacher: of algorithm.distillation, if there is one.
        """
        functions = make_learner_functions(
            abstract_params(model),
            model,
            TrainingSettings(
                algorithm=config.algorithm,
                learner=config.learner,
                total_steps=config.run.steps,
                temperature=config.rollout.temperature,
                valid_vocab=valid_vocab(model),
                max_completion_tokens=config.rollout.max_completion_tokens,
            ),
            devices=devices,
            teacher=teacher,
        )
        base = _base(functions, model, jax.numpy.dtype(config.learner.compute_dtype))
        return cls(
            config=config,
            plan=plan,
            functions=functions,
            base=base,
            reference=_reference(config, functions, base),
            teacher=_teacher_params(config, functions),
        )

    @property
    def resident(self) -> Parts:
        """What lies on a chip between two updates, while nothing of the learner runs."""
        state = self.functions.abstract_state
        between = {
            PARAMETERS: device_bytes(state.params),
            MOMENTS: device_bytes(state.opt_state),
            FROZEN: self._frozen_bytes,
            SNAPSHOTS: SNAPSHOTS_AT_ONCE * self.snapshot_bytes,
        }
        if self.config.rollout.max_staleness > 0:  # a worker decodes during an update, too
            between[GRADIENTS] = between[PARAMETERS]
        return between | self._on_this_host

    @property
    def offloaded_bytes(self) -> int:
        """Of optimiser state that a device keeps in the memory of its host between updates."""
        state = self.functions.abstract_state
        return device_bytes(on_devices(state).opt_state) - device_bytes(state.opt_state)

    @property
    def _on_this_host(self) -> dict[str, int]:
        """What lies in the memory of the host, where that is the device's. It counts beside `apply`
        too: while moments are moved, before and after it, they are there twice.
        """
        is_cpu = self.config.placement.platform == "cpu"
        return {HOST_MOMENTS: self.offloaded_bytes} if is_cpu and self.offloaded_bytes else {}

    @property
    def snapshot_bytes(self) -> int:
        """Of one published version on a chip."""
        dtype = PUBLISH_DTYPES[self.config.weights.dtype]
        return device_bytes(jax.tree.map(lambda leaf: _struct(leaf, dtype=dtype), self._trained))

    @property
    def _batches(self) -> dict[str, MicroBatch]:
        """The largest micro-batches, by the end of a program's name: those of the longest rows, and
        those of the row length with the most slots where they have more.
        """
        slots, longest = self.config.learner.longest_row, self.plan.row_tokens
        lengths = [tokens for tokens in row_buckets(slots) if tokens <= longest]
        fullest = max(lengths, key=lambda tokens: (slots // tokens * tokens, tokens))
        rows = {"": longest} | ({} if fullest == longest else {SHORTER: fullest})
        return {
            name: self.functions.batch_shapes(self.plan.mesh.rows * (slots // tokens), tokens)
            for name, tokens in rows.items()
        }

    @property
    def _trained(self) -> Params:
        return policy_params(self.functions.abstract_state.params)

    @property
    def _frozen_bytes(self) -> int:
        return device_bytes((self.reference if self.base is None else self.base, self.teacher))

    def _whole(self, params: Params) -> Params:
        return params if self.base is None else join(self.base, params)

    @property
    def _accumulator(self) -> Accumulator:
        """What `empty` returns, in shapes."""
        functions = self.functions
        shapes = jax.eval_shape(functions.empty, functions.abstract_state.params)
        put = lambda leaf, at: _struct(leaf, sharding=at)
        grads = jax.tree.map(put, shapes.grads, named_shardings(functions.mesh, functions.specs))
        whole = NamedSharding(functions.mesh, PartitionSpec())
        return Accumulator(grads, jax.tree.map(lambda leaf: put(leaf, whole), shapes.sums))

    def planned(self) -> Iterator[PlannedProgram]:
        """`empty`, `accumulate` and `apply` of one update, `score` where the objective needs
        logprobs or values before it, and `snapshot` and `canary` of a publication.

        An update is counted with two snapshots beside it, as if publications were slow.
        """
        functions, state = self.functions, self.functions.abstract_state
        between = dict(self.resident)
        between.pop(GRADIENTS, None)
        gradients = {GRADIENTS: between[PARAMETERS]}
        zeros = _lowering(functions.empty, state.params)
        yield PlannedProgram("empty", zeros, {}, between, makes=gradients)
        batches = self._batches
        for rows, batch in batches.items():
            yield self._accumulate(rows, batch, gradients, between)
        for rows, batch in batches.items():
            yield from self._scores(rows, batch.tokens_only, between)
        denominator = jax.ShapeDtypeStruct((), jax.numpy.float32)
        updated = on_devices(state)
        moments = {MOMENTS: device_bytes(updated.opt_state)}
        yield PlannedProgram(
            "apply",
            _lowering(functions.apply, updated, self._accumulator, denominator),
            _only(between, PARAMETERS) | moments | gradients,
            _only(between, FROZEN, SNAPSHOTS, HOST_MOMENTS),
        )
        wire, one = self.config.weights.dtype, {SNAPSHOTS: self.snapshot_bytes}
        yield PlannedProgram(
            "snapshot",
            _lowering(functions.snapshots[wire], self._trained),
            _only(between, PARAMETERS),
            _only(between, MOMENTS, FROZEN, HOST_MOMENTS) | one,
            makes=one,
        )
        policy = self._whole(self._trained)
        score = _lowering(functions.canaries[wire], policy)
        yield PlannedProgram("canary", score, *_inside_of(policy, between))

    def _accumulate(
        self, rows: str, batch: MicroBatch, gradients: Parts, between: Parts
    ) -> PlannedProgram:
        state, algorithm = self.functions.abstract_state, self.config.algorithm
        reference = None if algorithm.kl_in == "reward" else self.reference
        teacher = self.teacher if algorithm.teacher_in_loss else None
        coef = None if state.entropy_bonus is None else state.entropy_bonus.coef
        given = (state.params, reference, self._accumulator, batch, coef, teacher, self.base)
        used = device_bytes((reference if self.base is None else self.base, teacher))
        return PlannedProgram(
            ACCUMULATE + rows,
            _lowering(self.functions.accumulate, *given),
            {PARAMETERS: between[PARAMETERS], **gradients, FROZEN: used},
            _only(between, MOMENTS, SNAPSHOTS, HOST_MOMENTS) | {FROZEN: between[FROZEN] - used},
        )

    def _scores(self, rows: str, tokens: MicroBatch, between: Parts) -> Iterator[PlannedProgram]:
        """Of critic, policy, reference and teacher, where they are needed before an update."""
        functions, algorithm = self.functions, self.config.algorithm
        if functions.has_critic:
            params = self._whole(functions.abstract_state.params)
            score = _lowering(functions.score_values, params, tokens)
            yield PlannedProgram(SCORE_CRITIC + rows, score, *_inside_of(params, between))
        before = algorithm.ratio == "sequence" or _corrects(algorithm)
        in_reward, in_loss = algorithm.kl_in == "reward", algorithm.teacher_in_loss
        scored = [
            (SCORE, functions.score, self._whole(self._trained), before),
            (SCORE_REFERENCE, functions.score_reference, self.reference, in_reward),
            (SCORE_TEACHER, functions.score_teacher, self.teacher, not in_loss),
        ]
        for name, function, params, needed in scored:
            if needed and params is not None and function is not None:
                score = _lowering(function, params, tokens)
                first = PARAMETERS if name == SCORE else FROZEN
                yield PlannedProgram(name + rows, score, *_inside_of(params, between, first))


def _lowering(jitted: Any, *arguments: Any) -> Callable[[], jax.stages.Lowered]:
    """Lowers a jitted function for arguments of these shapes, once it is called."""
    return functools.partial(jitted.lower, *arguments)


def _inside_of(
    params: Params, between: Parts, first: str = PARAMETERS
) -> tuple[dict[str, int], dict[str, int]]:
    """What is inside a program that takes parameters alone, and what stays beside it.

    Args:
        first: whose part the parameters are; what exceeds it belongs to the other.
    """
    count = device_bytes(params)
    second = FROZEN if first == PARAMETERS else PARAMETERS
    inside = {first: min(count, between[first])}
    inside[second] = min(count - inside[first], between[second])
    beside = {name: size - inside.get(name, 0) for name, size in between.items()}
    return inside, beside


def _only(parts: Parts, *names: str) -> dict[str, int]:
    return {name: parts[name] for name in names if name in parts}


def _reference(
    config: RunConfig, functions: LearnerFunctions, base: Params | None
) -> Params | None:
    """The reference policy, if the objective has one."""
    if config.algorithm.kl_coef <= 0:
        return None
    trained = policy_params(functions.abstract_state.params)
    if base is None:
        dtype = jax.numpy.dtype(config.learner.compute_dtype)
        return jax.tree.map(lambda leaf: _struct(leaf, dtype=dtype), trained)
    lora = config.learner.lora
    return join(base, trained) if lora is not None and lora.init_from is not None else base


def _teacher_params(config: RunConfig, functions: LearnerFunctions) -> Params | None:
    """Of the distillation, if there is one."""
    if functions.teacher is None:
        return None
    return jax.tree.map(
        lambda leaf, at: _struct(leaf, dtype=config.learner.compute_dtype, sharding=at),
        abstract_params(functions.teacher.config),
        named_shardings(functions.mesh, functions.teacher.specs),
    )


def _base(functions: LearnerFunctions, model: ModelConfig, dtype: jax.numpy.dtype) -> Params | None:
    """The model under an adapter, if one trains."""
    if functions.base is None:
        return None
    return jax.tree.map(
        lambda leaf, at: _struct(leaf, dtype=dtype, sharding=at),
        abstract_params(model),
        named_shardings(functions.mesh, functions.base.specs),
    )


def _corrects(algorithm: AlgorithmConfig) -> bool:
    return Correction(**algorithm.off_policy.model_dump()).is_on


def _struct(leaf, *, dtype=None, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding or leaf.sharding)


def valid_vocab(model: ModelConfig) -> int:
    """Stands for the tokenizer's size; below the embedding's, so that the mask is compiled."""
    return model.vocab_size - 1
