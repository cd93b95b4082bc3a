"""A rollout worker's programs, compiled for chips that this machine lacks.

They are the decode engine's at their largest: the longest prefill chunks, a segment over the widest
cache, and the widening to it.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from driver.chip_plan.learner_programs import valid_vocab
from driver.chip_plan.run_program import Parts, PlannedProgram
from driver.config.plan import Plan
from driver.config.run_config import RunConfig
from models.config import ModelConfig
from rollout_worker.engine.decode_programs import DecodePrograms, device_bytes
from rollout_worker.engine_setup import EngineSetup

POLICY = "policy"
NEXT_POLICY = "policy that arrives"
KEPT_POLICY = "policy kept for an evaluation"
CACHE = "KV cache"
POOL = "prefilled prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPrograms:
    """What a worker compiles, with the arrays that its programs take."""

    config: RunConfig
    plan: Plan
    programs: DecodePrograms

    @classmethod
    def of(
        cls, config: RunConfig, model: ModelConfig, plan: Plan, *, devices: Any
    ) -> "WorkerPrograms":
        """Builds the functions; nothing is compiled yet.

        Args:
            devices: of the worker.
        """
        setup = EngineSetup(
            rollout=config.rollout,
            model=model,
            platform=config.placement.platform,
            weights_dtype=config.weights.dtype,
            several_turns=config.environment is not None,
            adapter=plan.adapter,
        )
        programs = setup.programs(setup.mesh(devices), valid_vocab=valid_vocab(model))
        return cls(config=config, plan=plan, programs=programs)

    @property
    def resident(self) -> Parts:
        """What lies on a chip while nothing of the worker runs."""
        worker = self.plan.worker
        idle = {POLICY: worker.policy_bytes, CACHE: self._slot_bytes, POOL: worker.pool_bytes}
        if self.config.rollout.max_staleness > 0:  # a version may arrive during an update, too
            idle[NEXT_POLICY] = worker.version_bytes
        return idle | self._kept

    @property
    def _kept(self) -> dict[str, int]:
        """An older version, which an evaluation beside training has while later ones come."""
        return {KEPT_POLICY: self.plan.worker.version_bytes} if self.plan.keeps_policy else {}

    @property
    def _slot_bytes(self) -> int:
        programs = self.programs
        return device_bytes(programs.slots_struct(programs.geometry.widths[-1]))

    def planned(self) -> Iterator[PlannedProgram]:
        """`empty`, `prefill`, `segment` and `resize`.

        Each is counted with a second policy beside it, as if a version could arrive at any time,
        and with the one that is kept for an evaluation; only `empty` runs after the older one is
        freed.
        """
        programs, sizes, worker = self.programs, self.programs.geometry, self.plan.worker
        narrow = device_bytes(programs.slots_struct(sizes.widths[0]))
        policy = {POLICY: worker.policy_bytes}
        pool = {POOL: worker.pool_bytes}
        cache = {CACHE: self._slot_bytes}
        arrives = {NEXT_POLICY: worker.version_bytes, **self._kept}
        made = {CACHE: narrow, **pool}
        yield PlannedProgram("empty", programs.lower_empty, {}, policy | self._kept, makes=made)
        for later in (False, True)[: 1 + sizes.has_later_chunks]:
            yield PlannedProgram(
                "prefill, later" if later else "prefill",
                functools.partial(programs.lower_prefill, sizes.chunks[-1], later=later),
                policy | pool,
                arrives | cache,
            )
        yield PlannedProgram(
            "segment",
            functools.partial(programs.lower_segment, sizes.widths[-1]),
            policy | cache | pool,
            arrives,
            rounds=programs.spec.segment_tokens,
        )
        if len(sizes.widths) > 1:
            before, after = map(programs.cache_bytes, sizes.widths[-2:])
            yield PlannedProgram(
                "resize",
                functools.partial(programs.lower_resize, *sizes.widths[-2:]),
                {CACHE: before},
                arrives | policy | pool,
                makes={CACHE: after},
            )
