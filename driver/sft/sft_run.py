"""Supervised training from its start to its end, in this process.

Which records a step trains on is a function of seed and step alone, and a checkpoint has all else
that a step reads: one that resumes takes the same steps, bit for bit.
"""

import contextlib
import functools
import pathlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from driver.accounting.jsonl import JsonlLog, read_lines
from driver.config.load_config import ConfigError
from driver.config.plan import checked
from driver.errors import NothingTrained, RunError
from driver.reports.metrics import close_trackers, open_trackers
from driver.sft.sft_config import SftConfig
from driver.sft.sft_plan import SftPlan
from driver.signals import Interrupted, StopSignal
from learner.durable.certificate import Certificate, check_certificate, make_certificate
from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_writer import CheckpointJob, CheckpointWriter
from learner.durable.saved import Saved
from learner.publish.policy_export import PolicyExport
from learner.sft.supervised_learner import SupervisedLearner
from learner.update.state import TrainState
from models.files.carried_files import read_carried
from models.files.checkpoint import load_model
from models.platform import WrongPlatform, require_platform

METRICS = "metrics.jsonl"
WRITE_S = 3600.0
"""How long a checkpoint may take that is written beside the training."""


class NoDevices(RunError):
    """This machine lacks the devices that the training asks for."""

    exit_code = 3


def run_training(config: SftConfig, folder: pathlib.Path, plan: SftPlan, *, resume: bool) -> None:
    """Trains as planned; returns when all steps are done and the policy is exported.

    Args:
        folder: exists and is locked; everything that the training leaves behind goes there.

    Raises:
        NothingTrained: if all steps are done and every update was skipped.
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
        RunError: anything else that a person can act on.
    """
    stop = StopSignal()
    stop.install()
    with contextlib.closing(SftTraining(config, folder, plan)) as training:
        if resume:
            training.restore()
        training.train(stop)
        training.check_trained()
        training.export()


class SftTraining:
    """Owns the learner, its checkpoints, the metrics log and the trackers."""

    def __init__(self, config: SftConfig, folder: pathlib.Path, plan: SftPlan):
        """Loads the model onto the devices.

        Raises:
            NoDevices: if the platform is not there.
            ConfigError: if the model or the mesh cannot work.
        """
        self._config, self._folder, self._plan = config, folder, plan
        platform = config.placement.platform
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
        try:
            devices = require_platform(platform)
        except WrongPlatform as error:
            raise NoDevices(str(error)) from error
        model = config.model
        loaded = checked(load_model, model.path, about=f"model.path={model.path}")
        carried = checked(
            read_carried,
            model.path,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            about=f"model.path={model.path}",
        )
        self._export = PolicyExport.of(
            loaded.config,
            loaded.stored_dtypes,
            plan.tokenizer,
            carried,
            config.checkpoint.export_dtype,
        )
        self._learner: SupervisedLearner = checked(
            SupervisedLearner,
            config.learner,
            loaded.config,
            loaded.params,
            total_steps=plan.steps,
            valid_vocab=min(plan.tokenizer.vocab_size, loaded.config.vocab_size),
            devices=devices,
        )
        self._held_out = {
            metric: self._learner.packed(sequences)
            for metric, sequences in plan.held_out_sequences().items()
        }
        self._checkpoints = CheckpointFolder(folder / "checkpoints", keep=config.checkpoint.keep)
        self._writer = CheckpointWriter(
            self._checkpoints, on_certified=lambda step, saved: [], timeout_s=WRITE_S
        )
        self._log = JsonlLog(folder / METRICS)
        self._trackers = open_trackers(
            folder,
            config.log.wandb,
            run_id=f"{config.run.name}-{secrets.token_hex(4)}",
            config=config.model_dump(mode="json"),
            warn=lambda warning: print(f"warning: {warning}", flush=True),
            tensorboard=config.log.tensorboard,
        )
        self._step = 0
        self._saved_step: int | None = None
        self._skipped: list[bool] = []
        """Of each step of this process: whether it left the weights as they were."""

    def restore(self) -> None:
        """Goes on from the newest complete checkpoint; from the start where there is none.

        Raises:
            ConfigError: if what is there cannot be trusted, or is of a longer training.
        """
        found = checked(self._checkpoints.restore, self._learner.abstract_state)
        if found is not None:
            if found.step > self._plan.steps:
                raise ConfigError(
                    f"--resume: {self._folder} has {found.step} steps behind it, more than the "
                    f"{self._plan.steps} asked for: raise run.steps or run.epochs"
                )
            self._learner.state, self._step = found.state, found.step
            if found.certificate is not None:
                where = f"the checkpoint of step {found.step}"
                now = self._certifier()(self._learner.state)
                checked(check_certificate, found.certificate, now, where)
            for reason in found.skipped:
                print(f"skipped a checkpoint: {reason}", flush=True)
        self._log.rewind(self._step)
        for tracker in self._trackers:
            tracker.resume_at(self._step)
        print(f"resumed at step {self._step}", flush=True)

    def train(self, stop: StopSignal) -> None:
        """Takes the steps that are left, and leaves a checkpoint of the last.

        Raises:
            Interrupted: as soon as a step has ended after a signal, with a checkpoint.
        """
        rules, every = self._config.eval, self._config.checkpoint.every_steps
        if rules.at_start and self._held_out and not read_lines(self._log.path):
            self._report(0, {})
        while self._step < self._plan.steps:
            metrics = self._learner.update(self._plan.batch(self._step + 1))
            self._say_ended(self._writer.take_ended())
            self._step += 1
            self._skipped.append(bool(metrics["train/update_skipped"]))
            self._report(self._step, metrics)
            try:
                stop.check()
            except Interrupted:
                print("interrupted: writing a checkpoint", flush=True)
                self._save()
                raise
            if every and self._step % every == 0 and self._step < self._plan.steps:
                self._save_in_passing()
        if self._saved_step != self._step:
            self._save()

    def export(self) -> None:
        """Writes the policy as a Hugging Face folder, if it is asked for."""
        if not self._config.checkpoint.export_hf:
            return
        target = self._folder / "export"
        named = self._learner.named_weights(self._export.narrowest)
        dtypes = checked(self._export.write, target, named)
        print(
            f"exported the policy in {dtypes}: python -m driver --config run.yaml "
            f"--set model.path={target}",
            flush=True,
        )

    def check_trained(self) -> None:
        """Raises NothingTrained if there were steps, and every one was skipped."""
        if self._skipped and all(self._skipped):
            raise NothingTrained(
                f"none of the {len(self._skipped)} steps changed the model, since loss or gradient "
                "was not finite: lower learner.optimizer.learning_rate, or correct the model"
            )

    def close(self) -> None:
        """Waits for a checkpoint in the background, and closes the log and the trackers."""
        try:
            self._say_ended(self._writer.close())
        finally:
            self._log.close()
            close_trackers(self._trackers)

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        """Measures the held-out loss where it is due; one line of the log, one of the terminal."""
        rules, steps = self._config.eval, self._plan.steps
        due = step == 0 or (rules.every_steps and step % rules.every_steps == 0)
        shown = [f"step {step:>{len(str(steps))}}/{steps}"]
        if metrics:
            shown += [
                f"loss {metrics['train/loss']:.4f}",
                f"lr {metrics['train/learning_rate']:.2e}",
                f"{metrics['throughput/train/input_tokens_per_s_update']:,.0f} tokens/s",
            ]
            if metrics["train/update_skipped"]:
                shown.append("skipped: loss or gradient is not finite")
        if self._held_out and (due or (step == steps and rules.at_end)):
            losses = {name: self._learner.loss(its) for name, its in self._held_out.items()}
            metrics = metrics | losses
            for name, loss in losses.items():
                shown.append(f"held-out {name.removeprefix('eval/')} {loss:.4f}")
        self._log.append({"step": step, "time": time.time(), **metrics})
        for tracker in self._trackers:
            tracker.log(step, metrics)
        print("  ".join(shown), flush=True)

    def _certifier(self) -> Callable[[TrainState], Certificate]:
        """Makes the certificate of a state at the current step."""
        return functools.partial(
            make_certificate, seed=self._config.run.seed, driver_state=self._record()
        )

    def _record(self) -> dict[str, Any]:
        """What is stored beside the weights: where in the data order the training is."""
        plan, index = self._plan, self._step * self._plan.sequences_per_step
        book = {"seed": self._config.run.seed, "prompt_count": plan.order.count, "cursor": index}
        return {"book": book, "prompts_digest": plan.marks["records"]}

    def _scores(self) -> dict[int, float]:
        """The first set's held-out loss by step, negative: higher is better."""
        name = next(iter(self._held_out), None)
        if name is None or not self._config.checkpoint.keep_best:
            return {}
        losses = {line["step"]: line.get(name) for line in read_lines(self._log.path)}
        return {step: -loss for step, loss in losses.items() if isinstance(loss, float)}

    def _save_in_passing(self) -> None:
        """Writes a checkpoint; where that fails, says so and goes on from the one before."""
        if self._config.checkpoint.asynchronous:
            self._writer.submit(self._job)
        else:
            self._writer.write(self._job)
        self._say_ended(self._writer.take_ended())

    def _save(self) -> None:
        """Writes a checkpoint of the last step.

        Raises:
            RunError: if it cannot be written.
        """
        self._writer.write(self._job)
        *earlier, last = self._writer.take_ended()
        self._say_ended(earlier)
        if last.problem:
            raise RunError(last.problem)
        self._say_ended([last])

    def _job(self) -> CheckpointJob:
        return CheckpointJob(
            step=self._step,
            state=self._learner.state,
            record=self._record(),
            certify=self._certifier(),
            scores=self._scores(),
        )

    def _say_ended(self, ended: Sequence[Saved]) -> None:
        """Says what is wrong with checkpoints that ended."""
        for saved in ended:
            if saved.problem:
                print(f"warning: {saved.problem}; the training goes on", flush=True)
            else:
                self._saved_step = saved.step
            for reason in saved.not_removed:
                print(f"warning: {reason}", flush=True)
