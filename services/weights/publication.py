"""One policy version on its way into a WeightStore: shard by shard, not visible yet."""

import concurrent.futures
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.weights.digest import (
    checksum,
    digest_of_specs,
    tensor_bytes,
    wire_dtype,
    with_checksums,
)
from services.wire.messages import Canary, TensorSpec, WeightManifest

Index = tuple[slice, ...]
"""Where a shard lies in its tensor: a slice of step 1 for each leading axis; () is all of it."""


class PublicationClosed(RuntimeError):
    """The publication was committed or aborted before."""


class PublicationIncomplete(ValueError):
    """A version was to be committed without all of its elements."""


@dataclasses.dataclass
class _Tensor:
    spec: TensorSpec
    view: np.ndarray
    """Unsigned integers in the tensor's shape, over its place in the stream."""
    written: list[tuple[range, ...]]
    """The boxes that shards have claimed, one range for each axis."""
    missing: int
    """Elements whose copy has not ended."""
    checksum: str = ""


class Publication:
    """Takes the shards of one version, in any order and from any number of threads."""

    def __init__(
        self,
        run_id: str,
        policy_version: int,
        specs: Sequence[TensorSpec],
        stream: np.ndarray,
        show: Callable[[WeightManifest, np.ndarray], None],
    ):
        """`WeightStore.begin` makes one.

        Args:
            run_id: stamped on the manifest.
            policy_version: to be made.
            specs: in stream order; checksums are not read.
            stream: uint8, where the bytes go.
            show: makes a complete version visible.
        """
        self.run_id = run_id
        self.policy_version = policy_version
        self._specs = tuple(specs)
        self._stream: np.ndarray | None = stream
        self._show = show
        self._lock = threading.Lock()
        self._tensors = {spec.name: _opened(spec, stream) for spec in specs}

    def write(self, name: str, index: Index, array: npt.ArrayLike) -> None:
        """Copies one shard to its place; from then on the source may change.

        The thread that completes a tensor also hashes it.

        Args:
            name: of the tensor.
            index: place of the shard in it, as JAX names it; () for all of it.
            array: host or device array of the tensor's dtype, which must not change meanwhile.

        Raises:
            PublicationClosed: after `commit` or `abort`.
            ValueError: if there is no such tensor, shape or dtype is another, or an element was
                written before.
        """
        source = np.asarray(array)
        tensor, target = self._claim(name, index, source)
        target[...] = tensor_bytes(source).view(target.dtype).reshape(target.shape)
        with self._lock:
            tensor.missing -= source.size
            whole = tensor.missing == 0
        if whole:
            tensor.checksum = _hashed(tensor.spec, self._open_stream())

    def commit(
        self,
        before_visible: Callable[[WeightManifest], None] | None = None,
        canary: Canary | None = None,
    ) -> WeightManifest:
        """Makes the version visible, whole.

        Args:
            canary: what the publisher made of the probe under these weights, if it ran one.
            before_visible: called with the manifest before the version can be requested; what it
                raises ends the commit, and the publication can still be aborted.

        Raises:
            PublicationClosed: after `commit` or `abort`.
            PublicationIncomplete: naming tensors that lack elements.
            ValueError: if a version as high was published meanwhile.
        """
        stream = self._open_stream()
        lacking = [name for name, tensor in self._tensors.items() if not tensor.checksum]
        if lacking:
            raise PublicationIncomplete(
                f"policy version {self.policy_version} lacks elements of {len(lacking)} of "
                f"{len(self._specs)} tensors, first of {lacking[0]!r}: write every shard of each "
                "tensor before the commit"
            )
        specs = with_checksums(self._specs, [t.checksum for t in self._tensors.values()])
        manifest = WeightManifest(
            run_id=self.run_id,
            policy_version=self.policy_version,
            tensors=specs,
            digest=digest_of_specs(specs),
            canary=canary,
        )
        if before_visible is not None:
            before_visible(manifest)
        self._show(manifest, stream)
        self.abort()
        return manifest

    def abort(self) -> None:
        """Releases the buffers; does nothing after a commit."""
        with self._lock:
            self._stream = None
            for tensor in self._tensors.values():
                tensor.view = np.empty(0, np.uint8)

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, *_) -> None:
        self.abort()

    def _open_stream(self) -> np.ndarray:
        stream = self._stream
        if stream is None:
            raise PublicationClosed(
                f"the publication of policy version {self.policy_version} has ended"
            )
        return stream

    def _claim(self, name: str, index: Index, source: np.ndarray) -> tuple[_Tensor, np.ndarray]:
        """Checks a shard and reserves its box for this thread; returns tensor and target."""
        if name not in self._tensors:
            raise ValueError(f"policy version {self.policy_version} has no tensor {name!r}")
        tensor = self._tensors[name]
        spec = tensor.spec
        box = _box(spec, index)
        shape = tuple(len(extent) for extent in box)
        if source.dtype.newbyteorder("<").name != spec.dtype or source.shape != shape:
            raise ValueError(
                f"tensor {name!r}, {spec.dtype} {spec.shape}, has {spec.dtype} {shape} at "
                f"{index}; got {source.dtype} {source.shape}"
            )
        with self._lock:
            self._open_stream()
            if source.size and any(_overlap(box, other) for other in tensor.written):
                raise ValueError(
                    f"elements of tensor {name!r} at {index} were written before: write each shard "
                    "once, whatever number of devices holds a copy"
                )
            tensor.written.append(box)
            return tensor, tensor.view[(*index, ...)]  # a view also where nothing is left to slice


def copy_all(
    publication: Publication, tensors: Mapping[str, npt.ArrayLike], *, threads: int
) -> WeightManifest:
    """Writes whole tensors from several threads, and commits; aborts if anything fails."""
    with publication, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        writes = [pool.submit(publication.write, name, (), t) for name, t in tensors.items()]
        for write in writes:
            write.result()
        return publication.commit()


def _opened(spec: TensorSpec, stream: np.ndarray) -> _Tensor:
    size = math.prod(spec.shape)
    raw = stream[spec.offset : spec.offset + spec.nbytes]
    view = raw.view(f"<u{wire_dtype(spec.dtype).itemsize}").reshape(spec.shape)
    return _Tensor(spec, view, [], size, _hashed(spec, stream) if size == 0 else "")


def _hashed(spec: TensorSpec, stream: np.ndarray) -> str:
    return checksum(stream[spec.offset : spec.offset + spec.nbytes])


def _box(spec: TensorSpec, index: Index) -> tuple[range, ...]:
    """Returns the extent of every axis; raises ValueError for anything but slices of step 1."""
    if len(index) > len(spec.shape) or not all(
        isinstance(part, slice) and part.step in (None, 1) for part in index
    ):
        raise ValueError(
            f"a shard of tensor {spec.name!r} {spec.shape} is named by slices of step 1, one for "
            f"each leading axis, got {index}"
        )
    parts = [*index, *[slice(None)] * (len(spec.shape) - len(index))]
    return tuple(
        range(*part.indices(length)) for part, length in zip(parts, spec.shape, strict=True)
    )


def _overlap(left: tuple[range, ...], right: tuple[range, ...]) -> bool:
    return all(
        max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(left, right, strict=True)
    )
