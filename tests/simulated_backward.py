"""The backward kernels on the simulation of simulated_dsl.py: their warps, memory and registers.

Head dims are a few columns, whatever the configuration says, because protocols do not depend on them. What stands below
the protocols is replaced: the layout of tensors in memory and registers, and the arithmetic on single registers.
"""

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
from simulated_cutlass import StandIn, identity, make_cutlass
from simulated_memory import WARP_ROWS, WARPGROUP_ROWS, Columns, Memory, Registers, Stages, Tiles, View


class Outputs:
    """DirectOutput: a warp's rows to global memory."""

    def __init__(self, dtype, columns, predicated=False):
        pass

    def store(self, target, _layout, registers, _memory, piece):
        rows = target.array[piece.batch, piece.first_row : piece.first_row + WARP_ROWS, piece.head]
        rows[:] = registers.read()[: len(rows)]


class SequenceBoxes:
    """load.SequenceBoxes: zeros from where the sequence ends."""

    def __init__(self, rows, columns):
        self.rows = rows

    def of_head(self, tiled, shared, head, batch, origin):
        return tiled.array[batch, origin:, head], shared

    def box(self, tiled, shared, tiles, block, length):
        first = block * self.rows
        valid = min(length - first, self.rows)
        tile = np.zeros((self.rows, tiles.shape[1]))
        tile[: max(valid, 0)] = tiles[first : first + max(valid, 0)]
        return tile


def rows_of(tensor, offset, length, mode=0):
    """sequence.rows_of, of gradients: (batch, length, heads, columns) here."""
    return tensor if offset is None else Memory(tensor.array[:, offset : offset + length])


class Replacements:
    """What the kernels find in place of their own functions, by module, and the tensors' part of cute."""

    def __init__(self, simulation):
        self.simulation = simulation
        self.additions = defaultdict(list)  # K/V tiles that were added to a piece of dQ, in order
        self.tiles = {}  # agent: the K/V tile that it adds
        self.turns_read = {}  # (agent, turn): what it read last

    def cutlass(self):
        return make_cutlass(self.simulation, self.cute())

    def cute(self):
        return {
            "copy": self.copy,
            "size": self.size,
            "make_layout": identity,
            "make_tensor": self.make_tensor,
            "make_rmem_tensor": lambda count, dtype: [None] * count,
            "local_tile": self.local_tile,
            "math": StandIn(exp2=lambda exponent, fastmath: np.exp2(exponent)),
        }

    def modules(self):
        return {
            "softmax": {"ROWS": 1},
            "load": {"head_tiles": self.head_tiles, "SequenceBoxes": SequenceBoxes},
            "sequence": {"rows_of": rows_of, "behind": lambda tensor, line: Memory(tensor.array[line or 0 :])},
            "mask": {"mask_scores": self.mask_scores},
            "products": {
                "new_accumulator": lambda product, tile: Registers(),
                "new_left_operand": lambda accumulator, dtype: Registers(),
                "rows_and_columns": View,
                "convert": self.convert,
                "store_copy": lambda *_: StandIn(retile=identity, partition_D=identity),
            },
            "output": {"DirectOutput": Outputs},
            "workspace": {
                "write_piece": self.write_piece, "read_piece": self.read_piece, "add_shared": self.add_shared,
                "add_or_store_shared": self.add_shared,
            },
            "backward_role": {"words_of": identity},
            "registers": {"released_by_first_lane": identity},
            "backward_products": {
                "issue": self.issue,
                "new_total": lambda columns: Registers(),
                "first_columns": lambda total, columns: total,
                "transposed": identity,
                "piece": Stages.piece,
                "make_backward_products": self.make_products,
                "make_dk_from_shared": self.make_dk_from_shared,
            },
            "backward_role_products": {"make_role_products": self.make_role_products},
            "backward_scores": {
                "own_keys": self.own_keys,
                "query_limits": lambda limits, first: (limits.firsts - first, limits.ends, first),
                "own_statistics": self.own_statistics,
                "exponentiate": self.exponentiate,
                "differentiate": lambda dp, p, delta: dp.write(p.read() * (dp.read() - delta)),
                "write_scores": lambda product, scores, layout, target, thread: self.copy(None, scores, target),
            },
            "backward_store": {"read_turn": self.read_turn, "give_turn": lambda turn: turn.add(1)},
        }  # fmt: skip

    def rows(self, first=0):
        """Rows of a tile, of the warpgroup's that begin at ``first``, that the current warp holds."""
        own = self.simulation.current.rows
        return slice(own.start + first, own.stop + first)

    def copy(self, atom, source, target, tma_bar_ptr=None):
        """By TMA, which lands later than the kernel may read; or of registers to a tile."""
        if tma_bar_ptr is None:
            self.simulation.point()
            target[self.rows()] = source.read()
        else:
            target[:] = np.nan

            def land():
                target[:] = source
                tma_bar_ptr.land()

            self.simulation.load(land)
        self.simulation.point()

    def size(self, tensor, mode=None):
        """Columns of registers; elsewhere one stands for all."""
        return tensor.read().shape[1] if isinstance(tensor, Registers) else 1

    def make_tensor(self, pointer, layout):
        return Columns(pointer.registers, pointer.first, layout) if isinstance(pointer, Columns) else pointer

    def local_tile(self, tensor, box, place):
        """64 rows of a tile; or one of the parts that are a dimension of their own here."""
        first, *columns = place
        if columns:
            return tensor[first * WARPGROUP_ROWS : (first + 1) * WARPGROUP_ROWS]
        return tensor[first]

    def head_tiles(self, tiled, shared, box, head, batch, origin=0):
        return Tiles(tiled.array[batch, origin:, head], box[0]), shared

    def mask_scores(self, scores, firsts, limits, value):
        columns = np.arange(WARPGROUP_ROWS)
        visible = columns < (WARPGROUP_ROWS if limits is None else limits[0])
        if firsts is not None:
            visible = visible & (columns >= firsts[0])
        scores[0, 0] = np.where(visible, scores[0, 0], value)

    def convert(self, accumulator, dtype, target=None):
        target = Registers() if target is None else target
        target.write(accumulator.read().copy())
        return target

    def write_piece(self, memory, registers, piece, thread=None):
        self.simulation.point()
        memory.array[piece][self.rows()] = registers.read()
        self.simulation.point()

    def read_piece(self, memory, registers, piece, thread=None):
        self.simulation.point()
        registers.write(memory.array[piece][self.rows()].copy())
        memory.array[piece][self.rows()] = np.nan
        self.simulation.point()

    def add_head(self, one_head):
        """SumStore.add_head; notes which K/V tile the agent adds."""

        def add_head(store, sums, turns, shared, work, *others):
            self.tiles[self.simulation.current] = work.n_block
            one_head(store, sums, turns, shared, work, *others)

        return add_head

    def add_shared(self, memory, shared, begins=False):
        """A bulk copy: it reads later, and adds (or stores) later than that."""
        agent, target = self.simulation.current, memory.array
        tile = self.tiles[agent]

        def add(values):
            target[:] = values if begins else target + values
            self.additions[target.ctypes.data].append(tile)

        def read():
            agent.sums.waiting.append(partial(add, shared.array.copy()))
            shared.array[:] = np.nan

        agent.reads.waiting.append(read)
        self.simulation.point()

    def issue(self, first, add, accumulator, a, b, columns=None):
        """One group of WGMMAs; operands are read when it runs."""
        operand = a if isinstance(a, Registers) else None
        rows = self.rows()
        accumulator.writers += 1
        if operand:
            operand.readers += 1

        def run():
            product = (operand.values if operand else a.read()[rows]) @ b.read()
            accumulator.values = product if first == "first" else accumulator.values + product
            accumulator.writers -= 1
            if operand:
                operand.readers -= 1

        self.simulation.current.products.waiting.append(run)
        self.simulation.point()

    def make_products(self, config, dtype, shared, warpgroup):
        k, v, q, do, ds = shared
        first = WARPGROUP_ROWS * warpgroup
        columns = k.tiles[0].shape[1] // config.column_pieces
        own_columns = slice(columns * warpgroup, columns * (warpgroup + 1)) if config.column_pieces > 1 else slice(None)
        queries = first if config.query_pieces > 1 else 0
        return SimpleNamespace(
            scores_first="first", scores_add="add", dv_add="add", dk_add="add", dq_first="first", dq_add="add",
            k=k.operand(lambda tile: tile[first:], 0), v=v.operand(lambda tile: tile[first:], 0),
            q=q.operand(np.transpose), do=do.operand(np.transpose),
            q_transposed=q.operand(), do_transposed=do.operand(),
            ds=ds.operand(lambda tile: tile.T[queries:]), k_transposed=k.operand(lambda tile: tile[:, own_columns], 0),
        )  # fmt: skip

    def make_dk_from_shared(self, config, dtype, ds, warpgroup):
        return "add", ds.operand(lambda tile: tile[WARPGROUP_ROWS * warpgroup :])

    def make_role_products(self, config, dtype, scores_of, total_of):
        (keys, queries), (rows, _) = scores_of, total_of
        return SimpleNamespace(
            scores_first="first", scores_add="add", total_add="add",
            keys=keys.operand(fixed=0), queries=queries.operand(np.transpose), rows=rows.operand(),
        )  # fmt: skip

    def make_query_products(self, shared, warpgroup):
        q, do, k, v = shared
        return SimpleNamespace(
            scores_first="first", scores_add="add", dq_add="add", q=q.operand(fixed=warpgroup),
            do=do.operand(fixed=warpgroup), k=k.operand(np.transpose), v=v.operand(np.transpose),
            k_transposed=k.operand(),
        )  # fmt: skip

    def own_keys(self, band, hook, first_key, seqlen_q, seqlen_k, run):
        keys, lengths = range(first_key, first_key + WARP_ROWS), (seqlen_q, seqlen_k)
        firsts = np.array([[band.first_query(key, *lengths, run.right)] for key in keys])
        ends = np.array([[band.end_query(key, *lengths, run.left)] for key in keys]) if band.left_bound else None
        limits = SimpleNamespace(firsts=firsts, ends=ends)
        return SimpleNamespace(first_queries=limits, begin_head=lambda *_: None)

    def own_statistics(self, rows, first, queries):
        self.simulation.point()
        return rows[0, first : first + queries].copy()

    def exponentiate(self, scores, lse, limits, run, sides, width, *hook):
        exponents = scores.read() * run.scale_log2 - lse
        columns = np.arange(exponents.shape[1])
        firsts, ends, first = limits
        if sides.right:
            exponents = np.where(columns >= firsts, exponents, -math.inf)
        if sides.left:
            ends = firsts + width if width is not None else ends - first
            exponents = np.where(columns < ends, exponents, -math.inf)
        scores.write(np.exp2(exponents))

    def read_turn(self, turn):
        """Who reads the same again waits until it is something new."""
        agent, place = self.simulation.current, (turn.array.ctypes.data, turn.index)
        last = self.turns_read.pop((agent, place), None)
        self.simulation.point(lambda: turn.get() != last, f"a turn other than {last}")
        self.turns_read[agent, place] = turn.get()
        return turn.get()

    def own_rows(self, one_row):
        """QueryConsumer.own_rows for all rows of a warp."""

        def own_rows(consumer, rows, first_row, *lengths):
            found = [one_row(consumer, rows, first_row + row, *lengths) for row in range(WARP_ROWS)]
            lse, delta = (np.array([getattr(each, name) for each in found]) for name in ("lse", "delta"))
            limits = np.array([np.reshape(each.keys.limits, 1) for each in found])
            keys = found[0].keys
            if hasattr(keys, "firsts"):  # in chunks
                firsts = np.array([np.reshape(each.keys.firsts, 1) for each in found])
                return type(found[0])([lse], [delta], type(keys)([firsts], [limits]))
            keys = keys._replace(limits=[limits] if keys.end is None else limits)
            return type(found[0])([lse], [delta], keys)

        return own_rows
