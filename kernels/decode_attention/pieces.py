"""Sizes, memory and list of pieces of one call of the TPU kernel.

Dimension key: that of reference.py, and
    M: pieces, as many as there could be
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
"""Groups in VMEM: one is worked on while the others arrive, each 1 MB in bfloat16."""
SPARE_BYTES = 4 << 20
"""VMEM for registers that spill and for small arrays."""


class KernelPlan(NamedTuple):
    """Sizes of one call."""

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
    """Whether rows may begin alike."""

    @property
    def tile(self) -> int:
        """Columns that lie together in memory."""
        return 32 // self.dtype.itemsize

    def check(self, interpret: bool) -> None:
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
        blocks = pltpu.VMEM((SLOTS, self.group, self.K, self.block_S, self.H), self.dtype)
        tiles = pltpu.VMEM((self.B, self.K, self.tile, self.H), self.dtype)
        state = pltpu.VMEM((self.K, self.N // self.K, self.H), jnp.float32)
        semaphores = pltpu.SemaphoreType.DMA
        per_group, single = semaphores((SLOTS,)), semaphores(())
        alone = [blocks, blocks, tiles, tiles, state, state, state, per_group, single]
        return alone + self._prefix_scratch()

    def _prefix_scratch(self) -> list[Any]:
        return prefixes.scratch(self.B, self.K, self.N // self.K, self.H) if self.shares else []

    def resources(self, query_dtype) -> dict[str, Any]:
        """What XLA must know: the work of full rows, and the VMEM."""
        B, N, K, S, H = self[:5]
        columns = SLOTS * self.group * self.block_S + B * self.tile
        # Query and output, whose heads of a group may fill a fraction of a tile.
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
        """The small arguments of the kernel, in its order: positions, pieces, number of pieces.

        Where rows share, what they need for that (PrefixRefs) comes first, and their pieces, filled
        up to whole groups, stand before those of each row alone.
        """
        if not self.shares:
            return [position_B, *self._alone(position_B)]
        found = prefixes.find(
            *(position_B, leader_B, shared_B),
            tile=self.tile,
            block_S=self.block_S,
            most=self._whole(prefixes.most_pieces(self.B, self.S, self.block_S)),
        )
        most = found.row_M.size
        shared = self._whole(found.count)
        row_M, own_M, total = self._alone(position_B - found.first_B, shared, most)
        # A sum over rows, since to look up numbers one by one takes a TPU longer.
        of_row = jnp.arange(self.B) == row_M[:, None]
        own_M += jnp.where(of_row, found.first_B, 0).sum(axis=1)
        here_M = jnp.arange(row_M.size) < shared
        mixed = lambda x_M, y_M: jnp.where(here_M, jnp.pad(x_M, (0, y_M.size - most)), y_M)
        pieces = mixed(found.row_M, row_M), mixed(found.own_M, own_M), total
        return [found.first_B, found.place_B, found.count, found.place_M, position_B, *pieces]

    def _alone(self, last_B, before: int | jax.Array = 0, most_before: int = 0):
        """Row and first column of every piece, int32 [M], and how many there are, int32 [1].

        Those behind the last, which fill its group, repeat it.

        Args:
            last_B: last column of each row, counted from where its first piece begins.
            before: pieces of another kind that come first, most_before at most.
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
        """As many pieces in groups that are full."""
        return -(-pieces // self.group) * self.group

    def columns(self, new_BKH) -> jax.Array:
        """float32 [K, B, H], rounded as the cache: of packed numbers no single row can be read."""
        return new_BKH.astype(self.dtype).astype(jnp.float32).swapaxes(0, 1)
