"""The configuration of the kernel that computes dQ by itself."""

from dataclasses import dataclass

from .config import (
    ELEMENT_BYTES,
    SHARED_ALIGNMENT,
    SHARED_MEMORY_LIMIT,
    SHORT_DTYPES,
    WGMMA_M,
    Checked,
    hook_name,
    mask_name,
)


@dataclass(frozen=True)
class QueryConfig(Checked):
    """A CTA owns 128 queries, 64 a consumer warpgroup, whose dQ stays in registers while it visits the keys that they
    see, ``tile_n`` at a time.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    right_bound: bool
    left_bound: bool = False
    packed: bool = False  # several sequences in one tensor, whose lengths the device knows
    softcap: bool = False
    alibi: str | None = None  # as in ForwardConfig
    chunked: bool = False
    score: object | None = None
    mask: object | None = None

    consumer_warpgroups = 2
    tile_m = WGMMA_M * consumer_warpgroups
    tile_n = 64  # dQ, S, dP and dS of 64 queries and these take 208 of 240 registers at head_dim 256
    stages = 2  # K tiles: one is held from its S to its dQ, under the next one's S

    @property
    def name(self):
        """Readable kernel name for profilers."""
        mask = mask_name(self)
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        tile = f"{self.tile_m}x{self.tile_n}{hook_name(self)}"
        return f"hopper_fa3_backward_{dims}_{mask}_{SHORT_DTYPES[self.dtype]}_{tile}_queries"

    @property
    def dynamic(self):
        """True where tiles are of unequal length, so that CTAs fetch them from a counter."""
        return self.right_bound or self.packed

    @property
    def value_stages(self):
        """V tiles: two where they fit."""
        return 2 if self._smem_bytes(2) <= SHARED_MEMORY_LIMIT else 1

    def smem_bytes(self):
        """Shared memory of a CTA in bytes, as query_kernel.py lays it out."""
        return self._smem_bytes(self.value_stages)

    def _smem_bytes(self, value_stages):
        queries = self.tile_m * (self.head_dim + self.head_dim_v) * ELEMENT_BYTES
        keys = self.tile_n * (self.stages * self.head_dim + value_stages * self.head_dim_v) * ELEMENT_BYTES
        return SHARED_ALIGNMENT + queries + keys  # barriers fill less than the first

    def rules(self):
        return (
            (
                self.smem_bytes() <= SHARED_MEMORY_LIMIT,
                f"shared memory must be at most {SHARED_MEMORY_LIMIT} bytes, got {self.smem_bytes()}",
            ),
        )
