"""The trained policy as a Hugging Face folder: the model that came in, trained."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from learner.publish.snapshot import PUBLISH_DTYPES
from models.adapter import AdapterShape, join, merge
from models.config import ModelConfig
from models.files.carried_files import CarriedFiles
from models.files.checkpoint import load_model, save_model, to_named
from models.files.hf_export import cast_to_stored, dtype_names
from models.tokenizer import Tokenizer
from models.transformer import Params
from services.weights.digest import tree_digest


def merged_into_model(
    model_path: str, adapter: Params, shape: AdapterShape, *, base_digest: str | None, where: str
) -> Params:
    """A model as its files have it, with an adapter merged in; on the host, layers stacked.

    Args:
        adapter: numpy arrays, layers stacked.
        base_digest: of the model that it was trained for.
        where: the adapter, for the error.

    Raises:
        ValueError: if the model is another one.
    """
    loaded = load_model(model_path)
    if tree_digest(to_named(loaded.params, loaded.config))[1] != base_digest:
        raise ValueError(
            f"{where} belongs to another model than {model_path} now holds: give the one that the "
            "run started from"
        )
    return merge(join(loaded.params, adapter), shape.scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyExport:
    """What an export needs beside the weights; read when training starts."""

    model: ModelConfig
    dtypes: Mapping[str, np.dtype]
    """Of each tensor, by Hugging Face's name."""
    tokenizer: Tokenizer
    carried: CarriedFiles

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dtypes: Mapping[str, np.dtype],
        tokenizer: Tokenizer,
        carried: CarriedFiles,
        dtype: str | None,
    ) -> "PolicyExport":
        """Takes over the model that came in.

        Args:
            dtypes: that its tensors are stored in.
            dtype: `bfloat16` or `float32`; None gives each tensor the type that it came in.
        """
        if dtype is not None:
            dtypes = dict.fromkeys(dtypes, PUBLISH_DTYPES[dtype])
        return cls(model=model, dtypes=dtypes, tokenizer=tokenizer, carried=carried)

    @property
    def narrowest(self) -> str:
        """The narrowest type that has all that the export needs of the weights."""
        narrow = set(self.dtypes.values()) == {PUBLISH_DTYPES["bfloat16"]}
        return "bfloat16" if narrow else "float32"

    def write(self, folder: pathlib.Path, named: Mapping[str, np.ndarray]) -> str:
        """Writes the folder, whole or not at all.

        Args:
            named: the weights by Hugging Face's names, of the type `narrowest` or wider.

        Returns:
            The types of its tensors, such as `bfloat16`.

        Raises:
            ValueError: if the folder holds something else.
        """
        cast = cast_to_stored(named, self.dtypes)
        save_model(folder, self.model, cast, self.tokenizer, self.carried)
        return " and ".join(dtype_names(cast.values()))
