"""Which Q tiles a CTA computes, and in which order."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class PersistentSchedule:
    """One CTA an SM; the tiles are dealt like cards.

    Heads come in sections whose K and V fit in L2 together. Within a section, a band with a right bound has tiles of unequal
    length: the longest come first. Every second round deals in the opposite direction, which evens out the sums.
    """

    tile_m: int
    longest_first: bool

    @cute.jit
    def card(self, round_index: Int32) -> Int32:
        """This CTA's place in a round."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return cutlass.select_(round_index % 2 == 1, ctas - 1 - cta, cta)

    @cute.jit
    def rounds(self, seqlen_q: Int32, heads: Int32, batch: Int32) -> Int32:
        """Number of tiles of this CTA: the last round may not reach it."""
        tiles = ((seqlen_q + self.tile_m - 1) // self.tile_m) * heads * batch
        ctas = cute.arch.grid_dim()[0]
        whole = tiles // ctas
        return whole + cutlass.select_(self.card(whole) < tiles - whole * ctas, Int32(1), Int32(0))

    @cute.jit
    def tile(self, round_index: Int32, seqlen_q: Int32, heads: Int32, batch: Int32, section: Int32):
        """``(m_block, head, batch_index)`` of this CTA's tile in a round."""
        m_blocks = (seqlen_q + self.tile_m - 1) // self.tile_m
        index = round_index * cute.arch.grid_dim()[0] + self.card(round_index)
        all_heads = heads * batch
        section_index = index // (section * m_blocks)
        within = index - section_index * section * m_blocks
        first_head = section_index * section
        in_section = cutlass.min(section, all_heads - first_head)
        m_block = within // in_section
        head_of_all = first_head + within - m_block * in_section
        if const_expr(self.longest_first):
            m_block = m_blocks - 1 - m_block
        batch_index = head_of_all // heads
        return m_block, head_of_all - batch_index * heads, batch_index
