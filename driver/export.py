"""`python -m driver.export --run DIR`: a checkpoint's policy as a Hugging Face folder.

Reads the folder of a run that goes on, has ended or was killed, and changes nothing in it but to
add the export. Folders of supervised training are read alike.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from ruamel.yaml.error import YAMLError

from driver.accounting.evaluations import Evaluations
from driver.accounting.jsonl import read_lines
from driver.config.sections.model import ModelSection
from driver.config.yaml_text import parse_yaml
from driver.hub_upload import HubRefused, upload_model
from driver.reports.status import ExitCode
from learner.config import LoraConfig
from learner.durable.checkpoint import read_verified_record
from learner.durable.checkpoint_manifest import DamagedCheckpoint
from learner.durable.stored_policy import (
    NoSuchCheckpoint,
    StoredCheckpoint,
    find_checkpoint,
    kept_steps,
    read_policy,
)
from learner.first_adapter import shape_of
from learner.publish.policy_export import PolicyExport, merged_into_model
from models.files.carried_files import read_carried
from models.files.checkpoint import read_stored_form, to_named
from models.load_tokenizer import load_tokenizer
from models.platform import leave_accelerators
from services.process.config_section import validated
from services.process.terminal_text import protect_terminal

CHECKPOINTS = "checkpoints"
ACCURACY = "eval/accuracy/strict"
HELD_OUT_LOSS = "loss"
"""Last part of the names under which supervised training logs its held-out losses."""


class CannotExport(ValueError):
    """The folder does not have what an export needs; the message says what is missing."""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver.export`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.export",
        description="Writes the policy of a checkpoint as a Hugging Face folder. The run may go on "
        "meanwhile.",
        epilog="exit codes: 0 written, 1 the upload failed, 2 there is nothing to export",
    )
    add = parser.add_argument
    add("--run", required=True, metavar="DIR", help="output folder of a run or of learner.sft")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    which.add_argument(
        "--best", action="store_true", help="the checkpoint with the best held-out evaluation"
    )
    add("--output", metavar="FOLDER", help="where to write (default: DIR/export-step-N)")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the tensors (default: checkpoint.export_dtype of the run)",
    )
    add(
        "--model",
        metavar="PATH",
        help="the model that the run started from (default: where it was then)",
    )
    add(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="upload the folder to this repository, made where there is none; needs HF_TOKEN or a "
        "login of huggingface_hub",
    )
    add("--public", action="store_true", help="make a new repository public, not private")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the folder; returns the exit code."""
    given = _parsed(arguments)
    leave_accelerators()
    run = pathlib.Path(given.run).absolute()
    try:
        stored, folder = export(
            run,
            step=best_step(run) if given.best else given.step,
            output=None if given.output is None else pathlib.Path(given.output),
            dtype=given.dtype,
            model_path=given.model,
        )
    except (CannotExport, NoSuchCheckpoint, DamagedCheckpoint) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    if given.push_to_hub:
        message = f"Policy of {run.name} after step {stored.step}"
        try:
            address = upload_model(
                folder, given.push_to_hub, message=message, private=not given.public
            )
        except HubRefused as error:
            print(f"error: {error}; the folder is {folder}", file=sys.stderr)
            return ExitCode.FAILED
        print(f"uploaded: {address}")
    return ExitCode.FINISHED


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    reader = parser()
    given = reader.parse_args(arguments)
    if given.public and not given.push_to_hub:
        reader.error("--public is of --push-to-hub, which is not given")
    if given.output is not None and _holds_something(pathlib.Path(given.output)):
        reader.error(f"--output {given.output!r} must be new or an empty folder")
    return given


def _holds_something(path: pathlib.Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def export(
    run: pathlib.Path,
    *,
    step: int | None,
    output: pathlib.Path | None,
    dtype: str | None,
    model_path: str | None,
) -> tuple[StoredCheckpoint, pathlib.Path]:
    """Writes the policy of a checkpoint.

    Args:
        run: folder of the run.
        step: of the checkpoint; None takes the newest.
        output: None writes beside the checkpoints.
        dtype: as `PolicyExport.of`; None takes what the run is configured to.
        model_path: of the model that the run started from; None takes the recorded path.

    Returns:
        the checkpoint, and the folder that was written.

    Raises:
        CannotExport, NoSuchCheckpoint, DamagedCheckpoint: saying what is missing.
    """
    settings, configured, lora = _recorded_settings(run)
    model_path = model_path or settings.path
    try:
        config, dtypes = read_stored_form(model_path)
        tokenizer = load_tokenizer(
            model_path,
            tokenizer=settings.tokenizer,
            chat_template=settings.chat_template,
            stop_tokens=settings.stop_tokens,
        )
        carried = read_carried(
            model_path, tokenizer=settings.tokenizer, chat_template=settings.chat_template
        )
    except ValueError as error:
        raise CannotExport(
            f"the model that the run started from cannot be read: {error}; give it by --model, or "
            "run this where the run was started"
        ) from error
    form = PolicyExport.of(config, dtypes, tokenizer, carried, dtype or configured)
    while True:
        stored = find_checkpoint(run / CHECKPOINTS, step)
        try:
            shape = None if lora is None else shape_of(lora, config)
            params = read_policy(stored, config, shape)
            if shape is not None:
                params = merged_into_model(
                    model_path,
                    params,
                    shape,
                    base_digest=read_verified_record(stored.folder).get("base_digest"),
                    where=f"the adapter of {stored.folder.name}",
                )
            break
        except (OSError, ValueError) as error:
            if stored.folder.is_dir():
                raise CannotExport(str(error)) from error
            if step is not None and step not in kept_steps(run / CHECKPOINTS):
                raise CannotExport(f"the run removed {stored.folder.name} meanwhile") from error
            # The run has a newer one by now, or has moved this one to those that are best.
    folder = output or run / f"export-step-{stored.step}"
    try:
        written = form.write(folder, to_named(params, config))
    except (OSError, ValueError) as error:
        raise CannotExport(f"{folder} cannot be written: {error}") from error
    print(f"exported step {stored.step} in {written}: {folder}")
    return stored, folder


def best_step(run: pathlib.Path) -> int:
    """Of the checkpoints that are kept, the one with the best evaluation; the newest of equals.

    Raises:
        CannotExport: if none of their steps was evaluated.
    """
    kept = kept_steps(run / CHECKPOINTS)
    newest = find_checkpoint(run / CHECKPOINTS)
    driver = read_verified_record(newest.folder).get("driver", {})
    if "evaluations" in driver:
        found = Evaluations.restore(driver).scores() | _later_accuracies(run)
    else:
        found = _held_out_scores(run)
    scores = {step: score for step in kept if (score := found.get(step)) is not None}
    if not scores:
        raise CannotExport(
            f"no step of {[*kept]} was evaluated with a known accuracy or loss: give one by --step"
        )
    return max(scores, key=lambda step: (scores[step], step))


def _later_accuracies(run: pathlib.Path) -> dict[int, float]:
    """Of a run's only set by step, those that came after the newest checkpoint among them."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if ACCURACY in line]
    return {int(line["eval/step"]): line[ACCURACY] for line in lines if "eval/step" in line}


def _held_out_scores(run: pathlib.Path) -> dict[int, float]:
    """Of supervised training: the first set's held-out loss by step, negative."""
    scores = {}
    for line in read_lines(run / "metrics.jsonl"):
        names = [n for n in line if n.startswith("eval/") and n.rpartition("/")[2] == HELD_OUT_LOSS]
        if names and isinstance(line[names[0]], float):
            scores[line["step"]] = -line[names[0]]
    return scores


def _recorded_settings(
    run: pathlib.Path,
) -> tuple[ModelSection, str | None, LoraConfig | None]:
    """`model`, `checkpoint.export_dtype` and `learner.lora`, as the run wrote them at its start."""
    path = run / "config.yaml"
    try:
        found = parse_yaml(path.read_text(encoding="utf-8")) or {}
        model = validated(ModelSection, found["model"])
        lora = found.get("learner", {}).get("lora")
        lora = None if lora is None else validated(LoraConfig, lora)
        return model, found.get("checkpoint", {}).get("export_dtype"), lora
    except FileNotFoundError:
        raise CannotExport(f"{run} has no config.yaml: give the output folder of a run") from None
    except (OSError, YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotExport(f"{path} is not as a run writes it: {error}") from error


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
