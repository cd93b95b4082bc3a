"""The teacher of a distillation: checked without its weights before a run, and loaded for it."""

import dataclasses

import numpy as np

from learner.config import AlgorithmConfig, DistillationConfig
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, load_model, read_model_config
from models.files.fingerprint import fingerprint
from models.load_tokenizer import read_vocabulary
from models.transformer import Params

_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherModel:
    """A teacher in host memory, with the rows of the vocabulary that the policy has."""

    config: ModelConfig
    params: Params
    """numpy arrays of any float dtype, layers stacked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherFiles:
    """What is known of a teacher before its weights are read."""

    config: ModelConfig
    digest: str
    """As `fingerprint` has it."""


def check_teacher(
    distillation: DistillationConfig,
    *,
    model_path: str,
    tokenizer: str | None,
    model: ModelConfig,
    sequence_tokens: int,
) -> TeacherFiles:
    """Checks that a teacher can say something of every token that the policy can sample.

    Args:
        model_path, tokenizer: of the policy, as ModelSection has them.
        sequence_tokens: longest prompt plus completion.

    Raises:
        ValueError: if files are missing, the vocabulary is another one, or sequences are too long
            for it; with values, rule and fix.
    """
    path = distillation.teacher
    config = read_model_config(path)
    check_model_files(path)
    ours, theirs = read_vocabulary(tokenizer or model_path), read_vocabulary(path)
    if differences := [(text, i) for text, i in ours.items() if theirs.get(text) != i]:
        shown = ", ".join(
            f"{text!r} is {i} here and {theirs.get(text, 'no token')} there"
            for text, i in sorted(differences, key=lambda one: one[1])[:_SHOWN]
        )
        raise ValueError(
            f"{path} has another vocabulary than {tokenizer or model_path}: {len(differences):,} "
            f"of {len(ours):,} tokens differ ({shown}); the teacher's has {len(theirs):,}. The "
            "divergence compares probabilities of the same token ids: choose a teacher with the "
            "model's tokenizer, such as a larger model of its family"
        )
    samplable = min(len(ours), model.vocab_size)
    if config.vocab_size < samplable:
        raise ValueError(
            f"{path} embeds {config.vocab_size:,} tokens, fewer than the {samplable:,} that the "
            "model can sample: choose a teacher that embeds all of them"
        )
    if sequence_tokens > config.max_position_embeddings:
        raise ValueError(
            f"{path} was trained for max_position_embeddings={config.max_position_embeddings}, but "
            f"rollout.max_prompt_tokens + rollout.max_completion_tokens = {sequence_tokens}: lower "
            "one of them, or choose another teacher"
        )
    return TeacherFiles(config=config, digest=fingerprint(path))


def load_teacher(
    algorithm: AlgorithmConfig, model: ModelConfig, *, digest: str | None = None
) -> TeacherModel | None:
    """The teacher that the objective needs, if any.

    Args:
        model: of the policy, whose rows of the vocabulary the teacher gets.
        digest: as the driver found it; None compares none.

    Raises:
        ValueError: if it cannot be loaded, or is another one than the driver's.
    """
    if algorithm.distillation is None:
        return None
    path = algorithm.distillation.teacher
    try:
        if digest is not None and fingerprint(path) != digest:
            raise ValueError(
                f"{path} holds other weights here than where the driver runs: copy the teacher "
                "from the driver's host"
            )
        loaded = load_model(path)
    except ValueError as error:
        raise ValueError(f"algorithm.distillation.teacher: {error}") from error
    return fitted(TeacherModel(config=loaded.config, params=loaded.params), model.vocab_size)


def fitted(teacher: TeacherModel, rows: int) -> TeacherModel:
    """The teacher with this many rows of the vocabulary.

    Models of one family are padded to different sizes beyond the tokens that they share, which are
    all that can be sampled: such rows are left out, or added as zeros.
    """
    if teacher.config.vocab_size == rows:
        return teacher
    params = dict(teacher.params)
    for name in ("embed_tokens", "lm_head"):
        if name in params:
            params[name] = {"weight": _with_rows(params[name]["weight"], rows)}
    config = dataclasses.replace(teacher.config, vocab_size=rows)
    return TeacherModel(config=config, params=params)


def _with_rows(weight: np.ndarray, rows: int) -> np.ndarray:
    kept = weight[:rows]
    if len(kept) == rows:
        return kept
    return np.concatenate([kept, np.zeros((rows - len(kept), kept.shape[1]), kept.dtype)])
