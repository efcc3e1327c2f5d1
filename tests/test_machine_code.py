"""The machine-code report, on recorded disassembler text and on two tiny kernels whose instructions are known."""

import importlib.metadata
import tempfile
from pathlib import Path

import pytest

from hopper_fa3 import machine_code
from hopper_fa3.machine_code import (
    MachineCode,
    ToolMissing,
    disassembler,
    instructions,
    main_kernel,
    parse,
    ptxas_version,
    report,
    split,
)

RESOURCES = """
Resource usage:
 Common:
  GLOBAL:0
 Function attention_0:
  REG:168 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:1356 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
LISTING = """
\t.text.attention_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0080*/               @P0 BRA `(.L_x_0) ;
        /*0160*/              @!P1 UTMALDG.4D [UR8], [UR4], desc[UR16] ;
.L_x_100:
        /*3070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*30a0*/             @!UP0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24 ;
        /*30b0*/                   MUFU.EX2 R4, R5 ;
        /*30c0*/                   STL [R1+0x4], R7 ;
        /*130d0*/                  LDL.64 R8, [R1] ;
        /*130e0*/                  LDL R8, [R1] ;
"""


def test_parse_reads_every_field_and_counts_by_family():
    found = parse(RESOURCES, LISTING)
    counts = {"LDC": 1, "BRA": 1, "UTMALDG": 1, "HGMMA": 2, "MUFU": 1, "STL": 1, "LDL": 2}
    assert found == MachineCode("attention_0", registers=168, stack=8, shared=1024, local=16, counts=counts)
    assert found.spills == 3


def test_parse_wants_exactly_one_kernel():
    other = RESOURCES.replace("attention_0", "attention_1")
    with pytest.raises(ValueError, match="exactly one kernel, got attention_0, attention_1"):
        parse(RESOURCES + other, LISTING)
    with pytest.raises(ValueError, match="exactly one kernel, got none"):
        parse("", LISTING)


def test_parse_refuses_a_listing_without_instructions():
    with pytest.raises(ValueError, match="got none in the disassembly"):
        parse(RESOURCES, "\t.text.attention_0:\n")


def several(*names):
    """What the disassemblers say of a cubin with these kernels; only the first multiplies matrices."""
    resources = RESOURCES.split(" Function")[0]
    listing = "\t.target\tsm_90a\n"
    for name in names:
        resources += f" Function {name}:\n  REG:{len(name)} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1356\n"
        listing += f"//--------------------- .text.{name} --------------------------\n"
        listing += LISTING.replace("HGMMA", "HGMMA" if name == names[0] else "IMAD")
    return resources, listing + "//--------------------- SYMBOLS --------------------------\n"


def test_kernels_of_a_cubin_come_in_the_order_of_launch():
    found = split(*several("k_1", "k_behind_10", "k_before_0"))
    codes = [parse(*texts) for texts in found]
    assert [(code.name, code.registers) for code in codes] == [("k_before_0", 10), ("k_1", 3), ("k_behind_10", 11)]
    assert [code.counts.get("HGMMA", 0) for code in codes] == [0, 2, 0]
    assert main_kernel(found) == found[1]


def test_one_report_is_of_one_kernel(monkeypatch):
    monkeypatch.setattr(machine_code, "disassemble", lambda cubin: split(*several("k_1", "main")))
    with pytest.raises(ValueError, match="exactly one kernel, got main, k_1"):
        report(b"")
    assert [code.name for code in machine_code.reports(b"")] == ["main", "k_1"]


def test_a_cubin_of_other_kernels_is_refused():
    resources, listing = several("k_0", "k_1")
    with pytest.raises(ValueError, match=r"the same kernels, got k_0, k_1 and k_0$"):
        split(resources, listing[: listing.index("//--------------------- .text.k_1")])
    with pytest.raises(ValueError, match="the same kernels, got none and none"):
        split("", "")
    with pytest.raises(ValueError, match="a kernel must have HGMMA, got none of 1"):
        main_kernel(split(resources, listing)[1:])
    first, second = split(resources, listing)
    assert main_kernel([second, first, first[:1] + second[1:]]) == first


def test_instructions_keep_labels_predicates_and_targets():
    first, branch, load, product, *_ = instructions(LISTING)
    assert (first.address, first.text, first.target) == (0, "LDC R1, c[0x0][0x28]", None)
    assert (branch.predicate, branch.target, branch.text) == ("P0", ".L_x_0", "@P0 BRA `(.L_x_0)")
    assert (load.family, load.opcode, load.labels) == ("UTMALDG", "UTMALDG.4D", ())
    assert (product.address, product.labels, product.predicate) == (0x3070, (".L_x_100",), "")
    assert product.operands == "R24, gdesc[UR20], RZ, !UPT"


def test_ptxas_version_stands_in_the_cubin():
    assert ptxas_version(b"\x7fELF\0ptxas\0Cuda compilation tools, release 13.4, V13.4.59\0") == "13.4.59"
    assert ptxas_version(b"\x7fELF") is None


def test_missing_tool_says_how_to_get_it(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(machine_code.importlib.metadata, "files", missing)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissing, match="cuobjdump is not installed: run `make setup`, or `pip install nvidia-cuda-"):
        disassembler("cuobjdump")


def test_tool_on_path_serves_where_the_package_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_code.importlib.metadata, "files", lambda package: None)
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert disassembler("nvdisasm") == str(tool)


@pytest.fixture(scope="module")
def tools():
    try:
        return [disassembler(name) for name in machine_code.PACKAGES]
    except ToolMissing as error:
        pytest.skip(str(error))


def test_report_refuses_what_is_no_cubin(tools):
    with pytest.raises(ValueError, match="cannot read this cubin"):
        report(b"not machine code")


def compiled(kernel):
    """Cubin of ``kernel(float32 tensor of symbolic length)``, one block of 32 threads."""
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute

    @cute.jit
    def launch(values: cute.Tensor):
        kernel(values).launch(grid=(1, 1, 1), block=(32, 1, 1))

    values = cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    with tempfile.TemporaryDirectory() as folder:
        cute.compile(launch, values, options=f"--keep-cubin --gpu-arch sm_90a --dump-dir={folder}")
        (file,) = Path(folder).glob("*.cubin")
        return file.read_bytes()


def test_report_counts_the_exponentials_of_a_kernel(tools):
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute

    @cute.kernel
    def exponentials(values: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(3):
            values[thread + 32 * i] = cute.math.exp2(values[thread + 32 * i], fastmath=True)

    found = report(compiled(exponentials))
    assert "exponentials" in found.name
    assert (found.stack, found.local, found.spills) == (0, 0, 0)
    assert 0 < found.registers <= 255
    assert found.counts["MUFU"] == found.counts["STG"] == 3
    assert "HGMMA" not in found.counts


def test_report_sees_registers_that_live_in_memory(tools):
    """An index known only at run time forces an array out of the registers: STL, LDL and a stack."""
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute

    @cute.kernel
    def indexed(values: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor(512, cutlass.Float32)
        for i in cutlass.range(512):
            held[i] = values[thread + i]
        values[thread] = held[cutlass.Int32(values[thread])]

    found = report(compiled(indexed))
    assert found.stack >= 512 * 4
    assert found.spills > 0
