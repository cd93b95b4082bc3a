"""A configuration on a topology: the programs of both roles, and what each leaves on its chips."""

import dataclasses
from collections.abc import Iterator, Sequence

from driver.chip_plan.learner_programs import MOMENTS, PARAMETERS, LearnerPrograms
from driver.chip_plan.published_models import model_of, teacher_of
from driver.chip_plan.run_program import (
    Parts,
    PlannedProgram,
    ProgramCompiler,
    RunProgram,
    added,
)
from driver.chip_plan.topology import Topology, check_run_on, devices_of
from driver.chip_plan.worker_programs import WorkerPrograms
from driver.config.load_config import load
from driver.config.plan import Plan, asked_devices, checked, derive
from driver.config.run_config import RunConfig
from models.config import ModelConfig

ROLES = ("learner", "worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the command was asked for."""

    path: str
    """Of the configuration."""
    overrides: tuple[str, ...]
    """As `python -m driver --set` takes them."""
    topology: Topology
    model_config: str | None = None
    """A config.json that stands for the model's."""
    layers: int | None = None

    def with_layers(self, layers: int) -> "PlanRequest":
        """The same of a model that is cut to its first layers."""
        return dataclasses.replace(self, layers=layers)

    def shape(self, *changes: str) -> "RunShape":
        """The run with further overrides.

        Raises:
            ConfigError: if it cannot be planned, with value, rule and fix.
        """
        config = load(self.path, [*self.overrides, *changes])
        model = model_of(config.model.path, self.model_config, self.layers)
        return run_shape(config, model, self.topology)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunShape:
    """The programs of a run, not yet compiled."""

    config: RunConfig
    model: ModelConfig
    plan: Plan
    topology: Topology
    learner: LearnerPrograms
    worker: WorkerPrograms

    def planned(self, role: str) -> Iterator[PlannedProgram]:
        """The programs of a role."""
        yield from (self.learner if role == "learner" else self.worker).planned()

    def compile_programs(
        self, roles: Sequence[str], names: frozenset[str] | None = None
    ) -> Iterator[RunProgram]:
        """Compiles one program after the other.

        Args:
            names: of the programs to compile; None compiles all of these roles.
        """
        for role in roles:
            compiler = ProgramCompiler(role, self.topology.kind, self.others(role))
            for planned in self.planned(role):
                if names is None or planned.name in names:
                    yield compiler.compile_program(planned)

    @property
    def state_bytes(self) -> int:
        """Parameters and optimiser state, once: a checkpoint has no copies."""
        resident = self.learner.resident
        each = resident[PARAMETERS] + resident[MOMENTS] + self.learner.offloaded_bytes
        return self.plan.mesh.shards * each

    @property
    def offloaded_bytes(self) -> int:
        """Optimiser state in the memory of the host that is not among what others() counts: each
        of the learner's devices has its own there.
        """
        if self.topology.kind is None:
            return 0
        return self.plan.mesh.data * self.plan.mesh.shards * self.learner.offloaded_bytes

    def beside(self, program: RunProgram) -> RunProgram:
        """The same program, which was compiled for another shape, beside what lies on its chips
        here.
        """
        planned = next(one for one in self.planned(program.role) if one.name == program.name)
        beside = added(planned.beside, self.others(program.role))
        return dataclasses.replace(program, beside=beside)

    def others(self, role: str) -> Parts:
        """What other processes and the other role keep in the memory that this role runs in.

        On the CPU these are the learner and all workers.
        """
        on_cpu = self.topology.kind is None
        if not self.plan.devices.shared and not on_cpu:
            return {}
        learner, worker = self.learner.resident, self.worker.resident
        if self.plan.devices.shared:
            return worker if role == "learner" else learner
        workers = self.config.rollout.workers.at_start - (role == "worker")
        beside = {name: workers * count for name, count in worker.items()}
        return added(beside, {} if role == "learner" else learner)


def run_shape(config: RunConfig, model: ModelConfig, topology: Topology) -> RunShape:
    """Builds the programs of a run for a topology; nothing is compiled.

    Raises:
        ConfigError: if the run cannot work, or not on this topology.
    """
    devices = asked_devices(config)
    check_run_on(topology, config, devices)
    distillation, teacher = config.algorithm.distillation, None
    if distillation is not None:
        teacher = teacher_of(distillation.teacher)
        teacher = dataclasses.replace(teacher, vocab_size=model.vocab_size)
    plan = derive(config, model, devices, teacher)
    return RunShape(
        config=config,
        model=model,
        plan=plan,
        topology=topology,
        learner=checked(
            LearnerPrograms.of,
            config,
            model,
            plan,
            devices=devices_of(topology, devices.learner),
            teacher=teacher,
        ),
        worker=checked(
            WorkerPrograms.of, config, model, plan, devices=devices_of(topology, devices.worker)
        ),
    )
