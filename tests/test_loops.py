"""Which instructions an iteration issues, and the clocks that follow, on a small listing written for this test."""

import sys
from pathlib import Path

import pytest

from hopper_fa3.kernels.config import ForwardConfig
from hopper_fa3.machine_code import instructions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import issue_slots
import loops

# A kernel in small: a producer with a conditional load, and a consumer that visits masked and unmasked blocks of each
# tile. Polling (.L_poll*) stands at the end and jumps back, as ptxas places it. Scores are made again (.L_again*) in a
# loop whose last jump skips or follows the products: ptxas chooses.
CODE = """
@P0 BRA `(.L_consumer)
.L_load: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll0)
.L_free: @P2 BRA `(.L_last)
UTMALDG.4D [UR8], [UR4], desc[UR16]
.L_last: UTMALDG.4D [UR12], [UR4], desc[UR16]
@P3 BRA `(.L_load)
EXIT
.L_consumer: BSSY B0, `(.L_met)
@P5 CALL.REL.NOINC `($helper)
BSYNC B0
.L_met: MOV R1, R2
.L_tile: MOV R3, R4
.L_masked: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll1)
.L_ready1: HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT
FSEL R24, R24, -INF, P0
.L_again1: MUFU.EX2 R24, R24
@!P6 BRA `(.L_kept1)
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT
BRA `(.L_again1)
.L_kept1: F2FP.BF16.F32.PACK_AB R8, R25, R24
@P4 BRA `(.L_masked)
.L_open: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll2)
.L_ready2: HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT
.L_marker: IADD3 R24, R24.reuse
.L_again2: MUFU.EX2 R24, R24
@!P6 BRA `(.L_kept2)
VOTE.ANY R4, PT, P5
@P5 BRA `(.L_made)
NOP
.L_made: HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT
FMUL R24, R24, R4
.L_kept2: @P6 BRA `(.L_again2)
F2FP.BF16.F32.PACK_AB R8, R25, R24
@P4 BRA `(.L_open)
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT
@P5 BRA `(.L_tile)
EXIT
.L_poll0: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll0)
BRA `(.L_free)
.L_poll1: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll1)
BRA `(.L_ready1)
.L_poll2: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2
@!P1 BRA `(.L_poll2)
BRA `(.L_ready2)
$helper: MUFU.RCP R3, R3
RET.REL.NODEC R10 `(kernel)
.L_end: BRA `(.L_end)
"""


def listing(code):
    """Lines "[LABEL:] INSTRUCTION" as nvdisasm writes them."""
    lines = ["\t.text.kernel:"]
    for address, line in enumerate(code.strip().splitlines()):
        label, separator, instruction = line.rpartition(": ")
        lines += [f"{label}:"] if separator else []
        lines.append(f"        /*{16 * address:04x}*/                   {instruction} ;")
    return "\n".join(lines)


def found(code):
    return loops.main_loops(instructions(listing(code)))


def families(iteration):
    return " ".join(instruction.family for instruction in iteration)


def test_an_iteration_is_what_the_loop_issues_when_no_barrier_is_polled_and_no_block_made_twice():
    result = found(CODE)
    assert families(result.unmasked) == "SYNCS BRA HGMMA IADD3 MUFU BRA BRA F2FP BRA"
    assert families(result.masked) == "SYNCS BRA HGMMA FSEL MUFU BRA F2FP BRA"
    assert families(result.producer) == "SYNCS BRA BRA UTMALDG UTMALDG BRA"  # the conditional load counts


def test_a_barrier_whose_first_question_is_inside_its_loop_is_polled_once():
    alone = CODE.replace("@!P1 BRA `(.L_poll1)\n.L_r", "BRA `(.L_poll1)\n.L_r")
    assert families(found(alone).masked) == "SYNCS BRA HGMMA FSEL MUFU BRA F2FP BRA SYNCS BRA BRA"


def test_the_masked_loop_is_known_by_its_selects_wherever_it_stands():
    swapped = CODE.replace("FSEL R24, R24, -INF, P0", "IADD3 R24, R24")
    swapped = swapped.replace(".L_marker: IADD3 R24, R24.reuse", "FSEL R24, R24, -INF, P0")
    result = found(swapped)
    assert result.masked[0].address > result.unmasked[0].address


def test_a_branch_into_a_loop_from_elsewhere_makes_no_loop_of_its_own():
    graph = loops.flow(instructions(listing(CODE)))
    headers = {graph.blocks[loop.header][0].labels[-1] for loop in loops.loops(graph)}
    polls = {".L_poll0", ".L_poll1", ".L_poll2"}
    again = {".L_again1", ".L_again2"}
    assert headers == polls | again | {".L_load", ".L_tile", ".L_masked", ".L_open"}  # .L_end is never reached


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("@P4 BRA `(.L_open)", "NOP", "two innermost loops over blocks, got 0xd0 .8 instructions, 1 HGMMA, 1 FSEL"),
        ("FSEL R24, R24, -INF, P0", "NOP", "one of two equal loops must select scores by FSEL, got 0x"),
        ("@P3 BRA `(.L_load)", "NOP", "one innermost loop with UTMALDG, got none"),
        ("@P3 BRA `(.L_load)", "BRX R2", "a branch must name its target, got BRX R2 at 0x60"),
        ("@P3 BRA `(.L_load)", "BRA `(.L_nowhere)", "a label of the listing, got BRA `..L_nowhere. at 0x60"),
        ("BSYNC B0", "BSYNC B0\nNOP", "BSYNC must stand before the label of a BSSY, got one at 0xa0"),
        (
            ".L_again1: MUFU.EX2 R24, R24",
            ".L_again1: HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT",
            "the loop at 0xd0 must have a path around the loops inside it",
        ),
    ],
)
def test_another_structure_is_refused(before, after, message):
    assert CODE.count(before) == 1
    with pytest.raises(ValueError, match=message):
        found(CODE.replace(before, after))


def test_clocks_of_a_block():
    """128 x 128 at head_dim 128: 4 * 128 * 128 * 128 FLOP at 4096 a clock; two warpgroups of one warp a scheduler."""
    assert issue_slots.tensor_clocks(128, 128, 128, 128) == 2048
    assert issue_slots.tensor_clocks(128, 128, 192, 128) == 2560
    assert issue_slots.issue_clocks(503, 2) == 1006
    # An exponential of each of 128 x 128 scores at 16 a clock and SM; a warp's instruction is 32, a thread has 64
    assert issue_slots.pipe_clocks(64, 2, issue_slots.EXPONENTIALS) == 128 * 128 / 16
    assert issue_slots.pipe_clocks(64, 2, issue_slots.FLOAT32) == 128 * 128 / 128


def test_the_largest_of_the_clocks_bounds_the_matrix_share():
    config = ForwardConfig("bfloat16", 64, 64, False, False, 192, 128, 2, True, True)
    counts = {"MUFU": 66, "FADD": 10, "FMUL": 20, "FFMA": 30, "FMNMX": 1000, "UMOV": 2}
    needed = issue_slots.clocks(config, counts)
    assert needed == {"tensor": 1536, "issue": 3 * 1128, "MUFU": 66 * 3 * 8, "FP32": 60 * 3}
    assert issue_slots.tensor_share(needed) == 1536 / (3 * 1128)
    assert issue_slots.tensor_share(needed | {"issue": 1000}) == 1536 / 1584
    assert issue_slots.tensor_share(needed | {"issue": 1000, "MUFU": 1000}) == 1
