"""How a consumer warpgroup of the forward makes a block's products to probabilities, and what it carries from block to
block.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup as wgmma

from . import fused
from .args import RunTime
from .barriers import any_of_warpgroup
from .blocks import NO_SIDE, Band, RowKeys, Sides
from .config import ForwardConfig
from .mask import mask_scores
from .phases import Phase, begin
from .probabilities import Probabilities, RegisterP, SharedP
from .products import Products, issue_scores, rows_and_columns
from .score import Pairs, ScoreHook, known_with
from .softmax import QUAD, Softmax, rescale_rows


class Rows(NamedTuple):
    """What one thread carries through the blocks of a tile."""

    acc_o: cute.Tensor
    probabilities: Probabilities
    shift: cute.Tensor
    sum: cute.Tensor
    keys: RowKeys
    slope: Float32 | None
    # With a slope: the key on the first row's diagonal, counted from the thread's first column of the first block
    diagonal: Int32 | None
    pairs: Pairs | None  # of the first row and the tile's origin; with hooks of a user's own


@dataclass(frozen=True)
class InPlaceSoftmax:
    """Any block: products become scores in place, then masked ones, then probabilities."""

    config: ForwardConfig
    band: Band
    softmax: Softmax
    probabilities: RegisterP | SharedP
    hook: ScoreHook

    # Whether a block that is done again takes another way to its probabilities, which serves scores of any size
    other_way_again = False

    def first_column(self, block: Int32) -> Int32:
        """The thread's first key of a block, counted from the tile's origin."""
        return block * self.config.tile_n + 2 * (cute.arch.lane_idx() % QUAD)

    def distance(self, rows: Rows, block: Int32) -> Int32:
        """By how many keys the thread's first one of a block lies behind its first row's diagonal."""
        return block * self.config.tile_n - rows.diagonal

    @cute.jit
    def apply_hook(self, scores: cute.Tensor, rows: Rows, block: Int32, run: RunTime):
        """One block's products to what the softmax takes, masks aside."""
        bias = None if rows.slope is None else self.hook.bias(rows.slope, self.distance(rows, block), scores[0])
        pairs = None
        if const_expr(self.hook.of_pairs):
            # Known with the scores only: else what is made of it stays in registers for when the block is done again
            key = rows.pairs.key + known_with(scores[0], self.first_column(block))
            pairs = rows.pairs._replace(key=key)
        self.hook.apply(rows_and_columns(scores), bias, pairs, run, self.softmax.masked)

    @cute.jit
    def mask(self, scores: cute.Tensor, rows: Rows, block: Int32, sides: cutlass.Constexpr[Sides], run: RunTime):
        """Mask one block's scores."""
        first_column = self.first_column(block)
        columns = self.band.columns(rows.keys, first_column, sides, run)
        mask_scores(rows_and_columns(scores), *columns, self.softmax.masked)

    @cute.jit
    def first(self, scores: cute.Tensor, sums: cute.Tensor, rows: Rows, masked: Boolean, block: Int32, run: RunTime):
        """Probabilities of the block that is visited first, and the rows' shifts."""
        self.apply_hook(scores, rows, block, run)
        if masked:
            self.mask(scores, rows, block, self.band.sides, run)
        begin(Phase.ROW_MAXIMUM)
        self.softmax.set_shift(rows_and_columns(scores), rows.shift, self.hook.scale(run))
        begin(Phase.EXPONENTIALS)
        self.softmax.exponentiate(rows_and_columns(scores), sums, rows.shift, self.hook.scale(run))

    @cute.jit
    def prepare(self, scores: cute.Tensor, rows: Rows, block: Int32, sides: cutlass.Constexpr[Sides], run: RunTime):
        """What does not meet the probabilities of the block before."""
        self.apply_hook(scores, rows, block, run)
        if const_expr(sides != NO_SIDE):
            begin(Phase.MASK)
            self.mask(scores, rows, block, sides, run)

    @cute.jit
    def exponentiate(
        self,
        products: Products,
        k_stage: Int32,
        scores: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        warpgroup: Int32,
        block: Int32,
        sides: cutlass.Constexpr[Sides],
        run: RunTime,
    ):
        """Probabilities of a prepared block, kept at once where P is early; ``sums``: this thread's of each row."""
        # Once in general, twice where a row outgrew its shift or its sum is infinite. Never more: at logits beyond
        # 2**27 rounding alone can pass the limit.
        outgrown, fresh = Boolean(True), Boolean(True)
        while outgrown:
            self.once(products, scores, sums, rows, block, run, again=False)
            outgrown = any_of_warpgroup(warpgroup, fresh & self.softmax.outgrown(sums))
            if outgrown:
                fresh = Boolean(False)
                begin(Phase.CATCH_UP)
                self.catch_up(products, k_stage, scores, sums, rows, run, block, sides)
                if const_expr(self.other_way_again):
                    outgrown = Boolean(False)
                    self.once(products, scores, sums, rows, block, run, again=True)

    @cute.jit
    def once(
        self,
        products: Products,
        scores: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        block: Int32,
        run: RunTime,
        again: cutlass.Constexpr[bool],
    ):
        begin(Phase.EXPONENTIALS)
        self.probabilities_of(scores, sums, rows, block, run, again)
        if const_expr(self.config.early_p):
            self.probabilities.keep(products, rows.probabilities, scores)

    def probabilities_of(
        self, scores: cute.Tensor, sums: cute.Tensor, rows: Rows, block: Int32, run: RunTime, again: bool
    ):
        self.softmax.exponentiate(rows_and_columns(scores), sums, rows.shift, self.hook.scale(run))

    @cute.jit
    def catch_up(
        self,
        products: Products,
        k_stage: Int32,
        scores: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        run: RunTime,
        block: Int32,
        sides: cutlass.Constexpr[Sides],
    ):
        """Make the block's scores again, which the exponentials overwrote, and move the shift of rows that outgrew
        theirs; P V of the block before has ended on return.
        """
        issue_again(products, k_stage, scores)
        self.apply_hook(scores, rows, block, run)
        if const_expr(sides != NO_SIDE):
            self.mask(scores, rows, block, sides, run)
        scale = self.hook.scale(run)
        rescale = self.softmax.catch_up(rows_and_columns(scores), sums, rows.shift, rows.sum, scale)
        rescale_rows(rows_and_columns(rows.acc_o), rescale)


@dataclass(frozen=True)
class FusedSoftmax(InPlaceSoftmax):
    """An unmasked block with a softcap or slopes: exponents straight from the products (fused.py). With a softcap it is
    done again also where their polynomial does not serve all of a row: its sum is infinite then.
    """

    def prepare(self, scores: cute.Tensor, rows: Rows, block: Int32, sides: Sides, run: RunTime):
        """Nothing."""

    @property
    def other_way_again(self):
        return self.config.softcap

    def probabilities_of(
        self, scores: cute.Tensor, sums: cute.Tensor, rows: Rows, block: Int32, run: RunTime, again: bool
    ):
        added = fused.terms(self.hook, self.bias(rows, block, scores), rows.shift, run)
        fused.exponentiate(rows_and_columns(scores), sums, added, run.polynomial, run, self.config.by_sums, again)

    @cute.jit
    def catch_up(
        self,
        products: Products,
        k_stage: Int32,
        scores: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        run: RunTime,
        block: Int32,
        sides: cutlass.Constexpr[Sides],
    ):
        issue_again(products, k_stage, scores)
        bias = self.bias(rows, block, scores)
        given = rows_and_columns(scores), sums, rows.shift, rows.sum, bias, run.polynomial, run
        rescale_rows(rows_and_columns(rows.acc_o), fused.catch_up(self.softmax, self.hook, *given))

    @cute.jit
    def bias(self, rows: Rows, block: Int32, scores: cute.Tensor):
        """The Bias of a block on one side of its rows' diagonals, or None."""
        if const_expr(rows.slope is None):
            return None
        distance, slope = self.distance(rows, block), rows.slope
        if const_expr(self.config.from_diagonal):
            slope = cutlass.select_(distance > 0, -slope, slope)
        return replace(self.hook, alibi="linear").bias(slope, distance, scores[0])


@cute.jit
def issue_again(products: Products, k_stage: Int32, scores: cute.Tensor):
    """Make a block's products again, which its probabilities overwrote; P V of the block before has ended then."""
    wgmma.fence()
    issue_scores(products, scores, k_stage)
    wgmma.wait_group(0)
