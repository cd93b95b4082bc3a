"""The resume certificate: one hash for each thing that a resume must restore exactly.

It is computed when a checkpoint is written and again from what was read back, and compared hash by
hash. It covers what the files' own checksums cannot: that the state on the devices is the one that
was saved, on any mesh, and that this program draws random numbers and orders prompts as before.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from learner.update.state import TrainState
from services.weights.digest import tree_digest

_ORDER_FIELDS = ("seed", "prompt_count", "cursor", "unfinished")
_NO_ARRAYS = hashlib.sha256(b"").hexdigest()
_SAMPLE_KEYS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """sha256 of each component, hex."""

    data_order: str
    """Which prompts come next: seed, cursor and leases that must be dispatched again."""
    keys: str
    """The seed of all random keys, and numbers that this program draws with some of them."""
    optimizer: str
    """Every array of the optimiser, its update count, and an adaptive entropy coefficient."""
    ledger: str
    """The driver's run state."""
    weights: str
    """The float32 master weights, the critic's head among them."""

    @property
    def whole(self) -> str:
        """One hash over all components."""
        return _of_json(dataclasses.asdict(self))

    def plain(self) -> dict[str, str]:
        """The content of certificate.json."""
        return {**dataclasses.asdict(self), "whole": self.whole}


class CertificateMismatch(ValueError):
    """What was read back is not what was saved; the message names the components."""


def make_certificate(
    state: TrainState, *, seed: int, driver_state: Mapping[str, Any]
) -> Certificate:
    """Computes the certificate of a learner and the driver's run state.

    Args:
        state: numpy arrays on the host, or on the devices, from where each is brought alone.
        seed: of the run.
        driver_state: JSON values; `book` holds seed, prompt_count, cursor and unfinished leases,
            and of several sources their `mixture`; `prompts_digest` stands for the data where it
            is given.
    """
    book = driver_state.get("book", {})
    order = {name: book.get(name) for name in _ORDER_FIELDS}
    order |= {"mixture": book["mixture"]} if "mixture" in book else {}
    order |= {"run_seed": seed, "prompts_digest": driver_state.get("prompts_digest")}
    return Certificate(
        data_order=_of_json(order),
        keys=_of_json(_drawn_with(seed)),
        optimizer=_of_arrays((state.opt_state, state.update_count, state.entropy_bonus)),
        ledger=_of_json(driver_state),
        weights=_of_arrays(state.params),
    )


def check_certificate(stored: Mapping[str, str], now: Certificate, where: str) -> None:
    """Compares what was read back with what was saved.

    Args:
        stored: as `Certificate.plain` gave it.
        now: of what was read back.
        where: the checkpoint, for the error.

    Raises:
        CertificateMismatch: naming the components that differ.
    """
    plain = now.plain()
    different = [name for name in plain if name != "whole" and stored.get(name) != plain[name]]
    if different or stored.get("whole") != plain["whole"]:
        raise CertificateMismatch(
            f"{where} does not keep its resume certificate: {', '.join(different) or 'whole'} "
            f"{'differ' if len(different) > 1 else 'differs'} from what was saved; resume with "
            "the program, run.seed and model that wrote it, or from another checkpoint"
        )


def check_base(stored: str | None, now: str | None, step: int) -> None:
    """Compares the model that a stored adapter belongs to with the one at hand.

    Args:
        stored, now: tree digests of both, hex; None where no adapter trains.
        step: of the checkpoint, for the error.

    Raises:
        ValueError: if they differ.
    """
    if stored != now:
        say = lambda digest: "none" if digest is None else digest[:12]
        raise ValueError(
            f"the checkpoint of step {step} holds an adapter of the model with digest "
            f"{say(stored)}, but the model at model.path has {say(now)}: put back the files that "
            "the run started from"
        )


def _of_arrays(tree: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    return tree_digest(named)[1] if named else _NO_ARRAYS


def _of_json(value: Any) -> str:
    """Hash of the value as JSON reads it back: tuples are lists, keys are strings."""
    plain = json.loads(json.dumps(value))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _drawn_with(seed: int) -> dict[str, Any]:
    """The seed, and the first numbers drawn with a few keys that are folded from it."""
    key = jax.random.key(seed % 2**32)
    drawn = [
        jax.random.bits(jax.random.fold_in(key, number), (2,)).tolist()
        for number in range(_SAMPLE_KEYS)
    ]
    return {"seed": seed, "implementation": str(jax.random.key_impl(key)), "drawn": drawn}
