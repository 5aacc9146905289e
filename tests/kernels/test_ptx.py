"""What tests/kernels/ptx.py reads, on programs of a few lines."""

import pytest

from tests.kernels import ptx

PROGRAM = """
.maxntid 384, 1, 1
{{
	setmaxnreg.{kind}.sync.aligned.u32 240;
	@%p1 bra 	$L__2;
$L__1:
	stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {{%r2}};
	{first}
	bar.sync 1, 128;
$L__2:
	{{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r3}}; }}
	@%p2 bra 	$L__1;
	st.global.b32 [%rd1], %r1;
	{second}
	@%p3 cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%rd2], [%r5];
	setmaxnreg.dec.sync.aligned.u32 {copying};
	ret;
}}
"""
FENCE, SHARED = "fence.proxy.async.shared::cta;", "st.shared.b32 [%r4], %r5;"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (FENCE, "", []),
        ("", "", ["wgmma", "cp.async"]),  # a barrier is none
        (FENCE, SHARED, ["cp.async"]),
        (FENCE, f"{SHARED}\n\t{FENCE}", []),
        (f"{FENCE}\n\t{SHARED}", "", ["wgmma", "cp.async"]),  # too early
        (FENCE, f"mbarrier.arrive.b64 _, [%r1];\n\t{SHARED}\n\t{FENCE}", []),
        (FENCE, f"{SHARED}\n\tmbarrier.arrive.b64 _, [%r1];\n\t{FENCE}", ["mbarrier.arrive"]),
    ],
)
def test_unfenced(first: str, second: str, found: list[str]) -> None:
    program = PROGRAM.format(kind="inc", first=first, second=second, copying=24)
    lines = ptx.unfenced(program)
    assert len(lines) == len(found)
    assert all(name in line for name, line in zip(found, lines, strict=True))


def test_stores_to_the_arrays_of_a_kernel_are_to_global_memory() -> None:
    """A store that names no memory is to shared memory if its address says nothing else."""
    copied = "{address}\n\tadd.s64 %rd8, %rd7, %rd6;\n\tst.v2.b32 [%rd8+32], {{%r1, %r2}};"
    for address, found in (
        ("ld.param.b64 %rd7, [k_param_2];", 0),
        ("mov.b64 %rd7, __dynamic_shmem__0;", 1),
        ("ld.param.b64 %rd6, [k_param_2];\n\tmov.b64 %rd7, __dynamic_shmem__0;", 1),
        ("", 1),
    ):
        second = copied.format(address=address)
        program = PROGRAM.format(kind="inc", first=FENCE, second=second, copying=24)
        assert len(ptx.unfenced(program)) == found, address


def test_registers() -> None:
    program = PROGRAM.format(kind="inc", first="", second="", copying=32)
    assert ptx.threads(program) == 384 and ptx.asked_registers(program) == 65536
    assert ptx.asked_registers(".maxntid 256, 1, 1") is None
    with pytest.raises(AssertionError):
        ptx.asked_registers(PROGRAM.format(kind="dec", first="", second="", copying=32))
