"""One CTA whose threads run on the CPU, each in a thread of its own: for kernels that know no WGMMA and no TMA.

Threads of a warp meet at each shuffle, all meet at each barrier; between these their order is the operating system's.
"""

import threading

import numpy as np
from simulated_cutlass import Kernels, StandIn, identity, select
from simulated_memory import Memory

WARP_THREADS = 32


class ThreadCta:
    """``threads``: a multiple of a warp's."""

    def __init__(self, threads):
        self.threads = threads
        self.own = threading.local()
        self.barrier = threading.Barrier(threads)
        self.warps = [threading.Barrier(WARP_THREADS) for _ in range(threads // WARP_THREADS)]
        self.given = [None] * threads
        self.atomic, self.making = threading.Lock(), threading.Lock()
        self.made, self.errors = None, []

    @property
    def thread(self):
        return self.own.thread

    def shuffle_up(self, value, distance):
        return self.shuffle(value, self.thread - distance if self.thread % WARP_THREADS >= distance else self.thread)

    def shuffle_bfly(self, value, offset):
        return self.shuffle(value, self.thread ^ offset)

    def shuffle(self, value, source):
        """What another thread of the warp gives."""
        warp = self.warps[self.thread // WARP_THREADS]
        self.given[self.thread] = value
        warp.wait()
        found = self.given[source]
        warp.wait()
        return found

    def add(self, pointer, value, **_):
        with self.atomic:
            return pointer.add(value)

    def once(self, make):
        """What the first thread makes, for all of them."""
        with self.making:
            if self.made is None:
                self.made = make()
        return self.made

    def run(self, body):
        """``body()`` in every thread; raises the first error."""

        def live(thread):
            self.own.thread = thread
            try:
                body()
            except Exception as error:
                self.errors.append(error)
                self.barrier.abort()
                for warp in self.warps:
                    warp.abort()

        threads = [threading.Thread(target=live, args=(thread,)) for thread in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            real = [error for error in self.errors if not isinstance(error, threading.BrokenBarrierError)]
            raise (real or self.errors)[0]

    def kernels(self, replacements):
        """The kernels' modules, for this CTA."""
        arch = StandIn(
            thread_idx=lambda: (self.thread, 0, 0),
            sync_threads=self.barrier.wait,
            shuffle_sync_up=self.shuffle_up,
            shuffle_sync_bfly=self.shuffle_bfly,
            atomic_add=self.add,
        )
        numbers = dict.fromkeys(("range", "range_constexpr"), lambda *bounds, **_: range(*bounds))
        cutlass = StandIn(
            cute=StandIn(jit=identity, kernel=identity, arch=arch),
            Int32=int, Float32=float, Boolean=bool, const_expr=identity, min=min, max=max, select_=select, **numbers,
        )  # fmt: skip
        return Kernels(cutlass, replacements)


def words(*shape):
    """Shared memory of numbers that nobody has written."""
    return Memory(np.full(shape, -(2**40), dtype=np.int64))


def float_bits(number):
    """tile_table.float_bits."""
    bits = int(np.float32(number).view(np.int32))
    return bits - (int(np.int32(bits).view(np.float32)) > number)  # rounded down
