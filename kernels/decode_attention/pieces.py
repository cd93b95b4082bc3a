"""Sizes, VMEM and work list of one call of the TPU kernel in pallas_tpu.py.

A piece is a block of columns of one row. The list is made by XLA from the positions, outside the
kernel; it is the same for all layers of a step.

Dimension key: that of reference.py, and
    M: places in the list: the pieces that there could be if every row were full
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.decode_attention import shared_prefixes as prefixes

LANES = 128
SLOTS = 3
"""Groups of pieces in VMEM, about 1 MB each in bfloat16: one is worked on, the others arrive."""
SPARE_BYTES = 4 << 20
"""VMEM for spilled registers and small arrays."""


class KernelPlan(NamedTuple):
    """Sizes of one call, and what follows from them."""

    B: int
    N: int
    K: int
    S: int
    H: int
    block_S: int
    group: int
    """Pieces that are fetched and worked on together."""
    dtype: Any
    """Of the cache."""
    shares: bool
    """Whether rows may share a prefix."""

    @property
    def tile(self) -> int:
        """Columns of the cache in one tile of HBM: 16 in bfloat16, 8 in float32."""
        return 32 // self.dtype.itemsize

    def check(self, interpret: bool) -> None:
        """Raises ValueError if the kernel cannot be compiled for these sizes."""
        if self.H % LANES and not interpret:
            raise ValueError(
                f"the TPU kernel takes head sizes that are multiples of {LANES}, since copies move "
                f"whole lanes; got H={self.H}: take `xla`"
            )
        if self.S % self.tile or self.block_S % self.tile:
            raise ValueError(
                f"S={self.S} and block_S={self.block_S} must be multiples of {self.tile}, the "
                f"columns of a tile of {self.dtype}"
            )

    def scratch(self) -> list[Any]:
        """The kernel's own memory, in the order of the fields of `_Refs` behind `value`."""
        blocks = pltpu.VMEM((SLOTS, self.group, self.K, self.block_S, self.H), self.dtype)
        tiles = pltpu.VMEM((self.B, self.K, self.tile, self.H), self.dtype)
        state = pltpu.VMEM((self.K, self.N // self.K, self.H), jnp.float32)
        semaphores = pltpu.SemaphoreType.DMA
        per_group, single = semaphores((SLOTS,)), semaphores(())
        own = [blocks, blocks, tiles, tiles, state, state, state, per_group, single]
        return own + self._prefix_scratch()

    def _prefix_scratch(self) -> list[Any]:
        return prefixes.scratch(self.B, self.K, self.N // self.K, self.H) if self.shares else []

    def resources(self, query_dtype) -> dict[str, Any]:
        """What XLA must know: the cost of full rows, for its scheduling, and the VMEM limit."""
        B, N, K, S, H = self[:5]
        # Of the cache in VMEM: blocks of all slots, and one tile a row.
        columns = SLOTS * self.group * self.block_S + B * self.tile
        # Query and output, whose G heads are padded to 8 sublanes; and the new columns.
        small_bytes = 2 * B * K * max(N // K, 8) * H * query_dtype.itemsize + 2 * B * K * H * 4
        prefix_bytes = sum(4 * math.prod(buffer.shape) for buffer in self._prefix_scratch())
        if self.shares:
            chains = self.group * self.K
            prefix_bytes += chains * prefixes.chain_bytes(self.block_S, N // K, H)
        return dict(
            cost_estimate=pl.CostEstimate(
                flops=4 * B * N * S * H,
                transcendentals=B * N * S,
                bytes_accessed=2 * B * K * S * H * self.dtype.itemsize,
            ),
            compiler_params=pltpu.CompilerParams(
                vmem_limit_bytes=2 * columns * K * H * self.dtype.itemsize
                + 2 * small_bytes
                + prefix_bytes
                + SPARE_BYTES
            ),
        )

    def scalars(self, position_B, leader_B, shared_B) -> list[jax.Array]:
        """The SMEM arguments of the kernel, in its order: positions, pieces, number of pieces.

        With shared prefixes their tables (PrefixRefs) come first, and the shared pieces, filled up
        to whole groups, stand in the list before the pieces of single rows.
        """
        if not self.shares:
            return [position_B, *self._single_rows(position_B)]
        found = prefixes.find_prefixes(
            *(position_B, leader_B, shared_B),
            tile=self.tile,
            block_S=self.block_S,
            most=self._whole(prefixes.most_pieces(self.B, self.S, self.block_S)),
        )
        most = found.row_M.size
        shared = self._whole(found.total)
        row_M, own_M, total = self._single_rows(position_B - found.first_B, shared, most)
        # A masked sum over rows: a gather of single numbers takes a TPU longer.
        of_row = jnp.arange(self.B) == row_M[:, None]
        own_M += jnp.where(of_row, found.first_B, 0).sum(axis=1)
        here_M = jnp.arange(row_M.size) < shared
        mixed = lambda x_M, y_M: jnp.where(here_M, jnp.pad(x_M, (0, y_M.size - most)), y_M)
        pieces = mixed(found.row_M, row_M), mixed(found.own_M, own_M), total
        return [found.first_B, found.place_B, found.total, found.place_M, position_B, *pieces]

    def _single_rows(self, last_B, before: int | jax.Array = 0, most_before: int = 0):
        """Row and first column of every piece, int32 [M], and their number, int32 [1].

        Places behind the last piece repeat it: they fill up its group.

        Args:
            last_B: last column of each row, counted from where its first piece begins.
            before: shared pieces, which come first in the list; at most most_before.
        """
        blocks_B = last_B // self.block_S + 1
        end_B = jnp.cumsum(blocks_B)
        most = self._whole(self.B * pl.cdiv(self.S, self.block_S)) + most_before
        count_M = jnp.arange(most, dtype=jnp.int32) - before
        count_M = jnp.minimum(count_M, end_B[-1] - 1)
        before_MB = end_B <= count_M[:, None]
        row_M = before_MB.sum(axis=1, dtype=jnp.int32)
        block_M = count_M - jnp.where(before_MB, blocks_B, 0).sum(axis=1)
        return row_M, block_M * self.block_S, end_B[-1:] + before

    def _whole(self, pieces):
        """The number of pieces rounded up to whole groups."""
        return -(-pieces // self.group) * self.group

    def columns(self, new_BKH) -> jax.Array:
        """New columns as float32 [K, B, H], with the rounding of the cache.

        float32, since a single row cannot be read from packed bfloat16.
        """
        return new_BKH.astype(self.dtype).astype(jnp.float32).swapaxes(0, 1)
