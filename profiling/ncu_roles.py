"""Whose stall samples are whose: the producer warp's or the consumers', and in which loop; what a stall waits for."""

from collections import Counter, defaultdict

import loops

SETUP, PRODUCER, MAIN, MASKED, REST = "setup", "producer", "main loop", "masked loop", "rest of a tile"
CONSUMERS = (MAIN, MASKED, REST)
ROLES = (SETUP, PRODUCER, *CONSUMERS)

# What ncu calls by one name and what differs by the instruction that is waited for: (stall, opcode family) -> our word
SPLIT = {
    ("barrier", "WARPGROUP"): "products",  # WARPGROUP.DEPBAR, which waits for WGMMA groups
    ("long_sb", "BRA"): "mbarrier",  # a branch waits for its predicate alone, and only SYNCS gives one that late
    ("mio", "MUFU"): "exponentials",
}
MEANING = {
    "selected": "issues an instruction",
    "not_selected": "ready; the scheduler issued for another warp",
    "wait": "fixed latency of the instruction before",
    "dispatch": "ready; dispatch held up, as by a busy pipe or register port",
    "math": "execution pipe busy",
    "products": "its matrix products still run (ncu: barrier, at WARPGROUP.DEPBAR)",
    "warpgroup_arrive": "its matrix product cannot start yet",
    "barrier": "named barrier: its turn in ping-pong, or its warpgroup",
    "mbarrier": "data not in shared memory yet, or no free place there (ncu: long_sb, at a branch)",
    "exponentials": "queue of the exponential unit full (ncu: mio, at MUFU)",
    "mio": "other queue of shared memory and special instructions full",
    "short_sb": "result of an exponential, a shuffle or shared memory",
    "long_sb": "result of global memory, a fence or a copy",
    "no_inst": "instruction cache",
    "imc": "constant cache",
    "branch_resolving": "branch target",
}


def roles(sampled):
    """Role of each instruction (a list beside ``sampled``), None where nothing leads to it.

    The producer's code is what follows USETMAXREG.DEALLOC, the consumers' what follows USETMAXREG.TRY_ALLOC, calls
    included; the loops are the consumers' innermost loops over blocks, with the polling of barriers and the making of
    scores again that belong to them; the one with the fewest selections (FSEL) does not mask. ValueError where the code
    has another structure.
    """
    graph = loops.flow([row.instruction for row in sampled])
    starts = {block[0].labels[0]: number for number, block in enumerate(graph.blocks)}
    after = [
        following | {starts[row.target] for row in block if row.family == "CALL" and row.target in starts}
        for block, following in zip(graph.blocks, graph.follow, strict=True)
    ]
    found = dict.fromkeys(loops.reached(0, after.__getitem__), SETUP)
    found |= dict.fromkeys(loops.reached(_block(graph, "USETMAXREG.DEALLOC"), after.__getitem__), PRODUCER)
    found |= dict.fromkeys(loops.reached(_block(graph, "USETMAXREG.TRY_ALLOC"), after.__getitem__), REST)
    for rank, loop in enumerate(product_loops(graph)):
        found |= dict.fromkeys(loop.members, MASKED if rank else MAIN)
    return [found.get(number) for number, block in enumerate(graph.blocks) for _ in block]


def product_loops(graph):
    """The innermost natural loops over blocks, those with few FSEL first; ValueError where there is none."""
    inner = loops.block_loops(graph, loops.loops(graph))
    if not inner:
        raise ValueError("the kernel must have a loop with HGMMA and SYNCS, got none")
    return sorted(inner, key=lambda loop: sum(loops.count(graph.blocks[number], "FSEL") for number in loop.members))


def register_budget(sampled):
    """(producer, consumer) registers a thread after USETMAXREG."""
    texts = {
        row.instruction.opcode: row.instruction.operands for row in sampled if row.instruction.family == "USETMAXREG"
    }
    found = {opcode.split(".")[1]: int(operands.split(",")[-1].strip(), 16) for opcode, operands in texts.items()}
    return found["DEALLOC"], found["TRY_ALLOC"]


def reasons(row):
    """The samples of one instruction by our words for what was waited for."""
    family = row.instruction.family
    return Counter({SPLIT.get((stall, family), stall): samples for stall, samples in row.stalls.items()})


def by_role(sampled, of_role):
    """Role -> reason -> samples."""
    found = {role: Counter() for role in ROLES}
    for row, role in zip(sampled, of_role, strict=True):
        if role is not None:
            found[role] += reasons(row)
    return found


def by_line(sampled, of_role, places):
    """Place -> [samples, reason -> samples without those that issued, role -> samples], most samples first."""
    found = defaultdict(lambda: [0, Counter(), Counter()])
    for row, role in zip(sampled, of_role, strict=True):
        place = places.get(row.instruction.address)
        if place is None:
            continue
        entry, here = found[place], reasons(row)
        entry[0] += here.total()
        entry[1] += Counter({reason: samples for reason, samples in here.items() if reason != "selected"})
        entry[2][role] += here.total()
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _block(graph, opcode):
    """Number of the first block that holds an instruction whose opcode starts so."""
    for number, block in enumerate(graph.blocks):
        if any(instruction.opcode.startswith(opcode) for instruction in block):
            return number
    raise ValueError(f"the kernel must hold {opcode}, got none: producer and consumers cannot be told apart")
