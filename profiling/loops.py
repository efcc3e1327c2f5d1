"""The loops of a disassembled forward kernel: what one iteration issues. Control-flow analysis, without a GPU.

A loop is a natural loop (Aho, Lam, Sethi, Ullman, "Compilers", section 9.6): a branch back to a block through which
every path to the branch leads, and all that lies between. Backward jumps alone would not do: ptxas moves the polling of
a barrier behind the kernel's end and jumps back from there.
"""

from typing import NamedTuple

ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "JMX")  # without a predicate, the next instruction does not follow
UNNAMED = ("BRX", "JMP", "JMX")  # no label says where they go


class Graph(NamedTuple):
    """Basic blocks by address (lists of Instructions), and for each the numbers of those that may follow."""

    blocks: list
    follow: list


class Loop(NamedTuple):
    """A natural loop: the numbers of its blocks."""

    header: int
    members: frozenset


class MainLoops(NamedTuple):
    """Instructions of one iteration on which no barrier has to be polled twice and no row outgrows its shift, by
    address.
    """

    unmasked: list  # consumer: a block of K and V of which each row sees all
    masked: list  # consumer: a block that the mask or the end of the keys cuts
    producer: list  # K and V of one block


def main_loops(instructions):
    """MainLoops of a forward kernel's Instructions.

    Consumer: the two innermost loops over blocks, of which the masked one selects scores (FSEL). Producer: the
    innermost loop with UTMALDG. ValueError, naming what was found, where the code has another structure.
    """
    graph = flow(instructions)
    found = loops(graph)
    consumers = [iteration(graph, loop, found) for loop in block_loops(graph, found)]
    if len(consumers) != 2:
        raise ValueError(f"the consumer must have two innermost loops over blocks, got {_described(consumers)}")
    unmasked, masked = sorted(consumers, key=lambda loop: count(loop, "FSEL"))
    if count(unmasked, "HGMMA") != count(masked, "HGMMA") or count(unmasked, "FSEL") == count(masked, "FSEL"):
        raise ValueError(f"one of two equal loops must select scores by FSEL, got {_described(consumers)}")
    producers = [iteration(graph, loop, found) for loop in innermost(graph, found, "UTMALDG")]
    if len(producers) != 1:
        raise ValueError(f"the producer must have one innermost loop with UTMALDG, got {_described(producers)}")
    return MainLoops(unmasked, masked, producers[0])


def count(instructions, family):
    return sum(instruction.family == family for instruction in instructions)


def innermost(graph, found, *families):
    """The Loops that hold such instructions, one of each family, while no loop inside them does."""
    holding = [loop for loop in found if all(_holds(graph, loop.members, family) for family in families)]
    return [loop for loop in holding if not any(other.members < loop.members for other in holding)]


def block_loops(graph, found):
    """The consumers' Loops over blocks of keys: the innermost ones with matrix products that also wait for K and V.
    The loop that makes a block's scores again has products too, but its K is there.
    """
    return innermost(graph, found, "HGMMA", "SYNCS")


def iteration(graph, loop, found):
    """The Instructions on the usual paths through one iteration, by address.

    A loop inside that holds products makes a block's scores again where a row outgrew its shift: it is gone through
    once, without what leads to those products or follows from them. Another one polls a barrier: it is not entered
    where the first question stands before it, else gone through once. ValueError where no path is left.
    """
    inside = [other for other in found if other.members < loop.members]
    again = [other for other in inside if _holds(graph, other.members, "HGMMA")]
    polls = {other.header for other in inside if other not in again}
    scores = {number for other in again for number in other.members if _holds(graph, [number], "HGMMA")}
    numbers = _paths(graph, loop, scores | polls) or _paths(graph, loop, scores)
    if not numbers:
        address = graph.blocks[loop.header][0].address
        raise ValueError(
            f"an iteration of the loop at {address:#x} must have a path around the loops inside it, got none"
        )
    return [instruction for number in sorted(numbers) for instruction in graph.blocks[number]]


def _paths(graph, loop, closed):
    """Numbers of the blocks on the paths from the loop's header back to it that avoid the ``closed`` ones."""
    follow = {number: graph.follow[number] & loop.members - closed for number in loop.members}
    before = {number: {other for other in follow if number in follow[other]} for number in follow}
    forward = reached(loop.header, follow.__getitem__)
    last = [number for number in forward if loop.header in follow[number]]
    # Each of these leads on to the loop's end, or it leads to what is left out
    backward = set().union(*(reached(number, before.__getitem__) for number in last))
    return forward & backward


def loops(graph):
    """The natural loops of a Graph; those that share their first block are one."""
    dominators = _dominators(graph)
    before = {number: {other for other in dominators if number in graph.follow[other]} for number in dominators}
    members = {}
    for number, above in dominators.items():
        for header in graph.follow[number] & above:
            body = reached(number, lambda at, header=header: set() if at == header else before[at])
            members.setdefault(header, {header}).update(body)
    return [Loop(header, frozenset(inside)) for header, inside in members.items()]


def flow(instructions):
    """The Graph of Instructions. A call continues behind itself, and so does BSYNC, which must stand before the label
    that its BSSY names. ValueError where a branch names no known label.
    """
    labels = {label: i for i, instruction in enumerate(instructions) for label in instruction.labels}
    starts = {0} | {i + 1 for i, instruction in enumerate(instructions) if instruction.family in ENDS}
    starts |= {_target(labels, instruction) for instruction in instructions if instruction.family == "BRA"}
    starts = sorted(starts - {len(instructions)})
    numbers = {start: number for number, start in enumerate(starts)}
    meetings = {instruction.target for instruction in instructions if instruction.family == "BSSY"}
    follow = []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        if last.family in UNNAMED:
            raise ValueError(f"a branch must name its target, got {last.text} at {last.address:#x}")
        after = {numbers[_target(labels, last)]} if last.family == "BRA" else set()
        if end < len(instructions) and (last.predicate or last.family not in ENDS):
            after.add(numbers[end])
        follow.append(after)
        for i in range(start, end):
            meets = i + 1 < len(instructions) and meetings.intersection(instructions[i + 1].labels)
            if instructions[i].family == "BSYNC" and not meets:
                raise ValueError(
                    f"BSYNC must stand before the label of a BSSY, got one at {instructions[i].address:#x}"
                )
    blocks = [instructions[start:end] for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    return Graph(blocks, follow)


def _target(labels, branch):
    if branch.target not in labels:
        raise ValueError(f"a branch must name a label of the listing, got {branch.text} at {branch.address:#x}")
    return labels[branch.target]


def _dominators(graph):
    """For each block that the first one reaches: the blocks on every path to it, itself included."""
    reachable = reached(0, lambda number: graph.follow[number])
    before = {number: [other for other in reachable if number in graph.follow[other]] for number in reachable}
    found = {number: set(reachable) for number in reachable} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for number in sorted(reachable - {0}):
            above = set.intersection(*(found[other] for other in before[number])) | {number}
            changed |= above != found[number]
            found[number] = above
    return found


def reached(start, step):
    """All that repeated steps reach from ``start``, itself included."""
    seen, ahead = {start}, [start]
    while ahead:
        new = step(ahead.pop()) - seen
        seen |= new
        ahead += new
    return seen


def _holds(graph, numbers, family):
    return any(count(graph.blocks[number], family) for number in numbers)


def _described(found):
    shown = [
        f"{loop[0].address:#x} ({len(loop)} instructions, {count(loop, 'HGMMA')} HGMMA, {count(loop, 'FSEL')} FSEL)"
        for loop in found
    ]
    return ", ".join(shown) or "none"
