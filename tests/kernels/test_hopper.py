"""The emulator of tests/kernels/hopper on programs of a few lines: what it computes, and the faults
that it must see.
"""

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.hopper.block import AHEAD, LATE, RANDOM, TIMINGS, Deadlock, ThreadBlock, Timing
from tests.kernels.hopper.host import Descriptor, Launch, broken_rules, read_launch
from tests.kernels.hopper.lanes import compile_lanes
from tests.kernels.hopper.memory import (
    SHARED_BASE,
    Fault,
    GlobalMemory,
    SharedMemory,
    Window,
    matrix,
)
from tests.kernels.hopper.program import parse, unordered_products

KERNEL = """
.visible .entry k(
	.param .u64 .ptr .align 256 k_param_0,
	.param .align 64 .b8 k_param_1[256]
)
.maxntid {threads}, 1, 1
{{
	.reg .pred %p<9>;
	mov.b64 %rd0, k_param_1;
	cvta.param.u64 %rd1, %rd0;
	add.s64 %rd2, %rd1, 128;
	mov.b64 %rd3, __dynamic_shmem__0;
	cvt.u32.u64 %r3, %rd3;
	mov.u32 %r1, %tid.x;
	ld.param.b64 %rd4, [k_param_0];
	shl.b32 %r2, %r1, 2;
	cvt.u64.u32 %rd5, %r2;
	add.s64 %rd6, %rd4, %rd5;
	add.s64 %rd7, %rd3, %rd5;
	elect.sync %r9|%p1, -1;
	setp.lt.and.u32 %p1, %r1, 32, %p1;
	add.s32 %r4, %r3, 2048;
	mov.b32 %r5, 1;
	@%p1 mbarrier.init.shared::cta.b64 [%r4], %r5;
	bar.sync 0;
{body}
	ret;
}}
"""
WAIT = """
	{ .reg .pred P1;
	LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r4], 0, 1000;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE: }
"""
LOAD = """
	@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r4], 1024;
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd1, {0, 0}], [%r4];
"""  # noqa: E501
STORE = """
	@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [%r3];
	cp.async.bulk.commit_group;
"""
DRAIN = "	cp.async.bulk.wait_group 0;\n	bar.sync 1, 32;\n"
SOURCE = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)


def run(
    body: str, timing: Timing = RANDOM, *, threads: int = 32, registers: int = 64
) -> np.ndarray:
    """Run a kernel over SOURCE, windows of its first 8 rows, and return the array that it writes
    to.
    """
    window: dict[str, Any] = {"sizes": (16, 32), "strides": (32, 1), "window": (8, 32)}
    descriptors = tuple(Descriptor(array=i, itemsize=4, swizzle=128, **window) for i in range(2))
    launch = Launch(grid=(1, 1, 1), threads=threads, shared_memory=4096, arguments=(1, descriptors))
    memory = GlobalMemory([SOURCE, np.full_like(SOURCE, np.nan)])
    program = parse(KERNEL.format(threads=threads, body=body))
    ThreadBlock(program, launch, memory, timing, registers).run((0, 0, 0))
    return memory.arrays[1]


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_a_copy_there_and_back(timing: Timing) -> None:
    result = run(LOAD + WAIT + STORE + DRAIN, timing)
    assert np.array_equal(result[:8], SOURCE[:8]) and np.isnan(result[8:]).all()


def test_a_wait_left_out_copies_garbage() -> None:
    with pytest.raises(Fault, match="ends while asynchronous work"):
        run(LOAD + STORE, LATE)
    body = LOAD + STORE + DRAIN + WAIT
    assert not np.array_equal(run(body, LATE)[:8], SOURCE[:8])
    assert np.array_equal(run(body, AHEAD)[:8], SOURCE[:8])  # where the copy happens to be soon


STORES = "	st.shared.b32 [%rd7], %r1;\n"
SENDS = """
	@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%rd3], 128;
	cp.async.bulk.commit_group;
"""


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_a_store_without_its_fence_is_not_seen_by_tma(timing: Timing) -> None:
    fence = "	fence.proxy.async.shared::cta;\n"
    good, late, none = (
        run(body + SENDS + DRAIN, timing).view(np.uint32)[0]
        for body in (STORES + fence, fence + STORES, STORES)
    )
    assert np.array_equal(good, np.arange(32))
    assert not np.array_equal(late, np.arange(32)) and not np.array_equal(none, np.arange(32))


def test_a_result_overwritten_while_it_is_sent() -> None:
    fence = "	fence.proxy.async.shared::cta;\n"
    again = "	st.shared.b32 [%rd7], %r2;\n" + fence
    reads = "	cp.async.bulk.wait_group.read 0;\n"
    for wait, right in (("", False), (reads, True)):
        body = STORES + fence + SENDS + wait + again + DRAIN
        assert np.array_equal(run(body, LATE).view(np.uint32)[0], np.arange(32)) == right


def test_barriers() -> None:
    with pytest.raises(Deadlock, match="try_wait"):
        run(WAIT)
    with pytest.raises(Fault, match="more arrivals"):
        run("	mbarrier.arrive.release.cta.shared::cta.b64 _, [%r4], 2;\n")
    with pytest.raises(Fault, match="no barrier"):
        run("	mbarrier.arrive.release.cta.shared::cta.b64 _, [%r3], 1;\n")
    with pytest.raises(Deadlock, match=r"bar\.sync 1, 64"):
        run("	bar.sync 1, 64;\n")
    with pytest.raises(Fault, match="named barrier 1 of 16"):
        run("	bar.sync 1, 16;\n")


@pytest.mark.parametrize(("asker", "answer"), [(3, 1), (40, 1), (64, 0)])
def test_a_question_at_a_barrier(asker: int, answer: int) -> None:
    """All threads of two warps learn whether it is true of one."""
    body = f"""
	setp.eq.u32 %p2, %r1, {asker};
	bar.red.or.pred %p3, 1, 64, %p2;
	selp.b32 %r6, 1, 0, %p3;
	st.global.b32 [%rd6], %r6;
"""
    result = run(body, threads=64).view(np.uint32).reshape(-1)[:64]
    assert (result == answer).all()


def test_nobody_asks_where_others_only_wait() -> None:
    body = """
	setp.ge.u32 %p2, %r1, 32;
	@%p2 bra $L__1;
	bar.red.or.pred %p3, 1, 64, %p2;
	ret;
$L__1:
	bar.sync 1, 64;
"""
    with pytest.raises(Fault, match="some ask and others do not"):
        run(body, threads=64)


def test_registers_of_a_block() -> None:
    """Four warpgroups' worth of nobody: one warp gives registers, another one waits for them."""
    body = """
	setp.ge.u32 %p2, %r1, 32;
	@%p2 bra $L__1;
	setmaxnreg.dec.sync.aligned.u32 {given};
	ret;
$L__1:
	setmaxnreg.inc.sync.aligned.u32 {taken};
"""
    run(body.format(given=24, taken=104), threads=64)
    with pytest.raises(Deadlock, match="setmaxnreg"):
        run(body.format(given=32, taken=104), threads=64)
    with pytest.raises(Fault, match="whole eights"):
        run(body.format(given=24, taken=100), threads=64)


def test_lanes_that_part_are_a_fault() -> None:
    with pytest.raises(Fault, match="lanes part"):
        run("	setp.lt.u32 %p2, %r1, 3;\n	@%p2 bra $L__1;\n$L__1:\n")


def test_accesses_outside_are_faults() -> None:
    with pytest.raises(Fault, match="outside of array 1"):
        run("	st.global.b32 [%rd6+2048], %r1;\n")
    with pytest.raises(Fault, match="not all in shared memory"):
        run("	st.shared.b32 [%rd7+4096], %r1;\n")
    with pytest.raises(Fault, match="not aligned"):
        run("	st.shared.b32 [%rd7+2], %r1;\n")
    with pytest.raises(Fault, match="not in global memory"):
        run("	st.global.b32 [%rd7], %r1;\n")


def test_products() -> None:
    """Operands in shared memory as TMA lays them out, and a result in the registers of a warp."""
    rng = np.random.default_rng(0)
    memory = SharedMemory(32768, np.zeros(SharedMemory.garbage_size(32768), np.uint8))
    x = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    tiles: dict[str, Any] = {"sizes": (64, 64), "strides": (64, 1), "window": (64, 64)}
    window = Window(Descriptor(array=0, itemsize=2, swizzle=128, **tiles))
    window.load(GlobalMemory([x]), (0, 0), memory, SHARED_BASE)
    swizzle, eight_rows = 1 << 62, (1024 >> 4) << 32
    for k in (0, 16, 48):
        start = (SHARED_BASE + 2 * k) >> 4
        rows = matrix(memory, swizzle | eight_rows | start, 64, transposed=False)
        assert np.array_equal(rows.view(x.dtype), x[:, k : k + 16])
        start = (SHARED_BASE + 128 * k) >> 4
        columns = matrix(memory, swizzle | eight_rows | start, 64, transposed=True)
        assert np.array_equal(columns.view(x.dtype), x[k : k + 16].T)


PRODUCT = """
	wgmma.fence.sync.aligned;
	{ .reg .pred p; setp.ne.b32 p, 1, 0;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}, {%r10,%r10,%r10,%r10}, %rd9, p, 1, 1, 0; }
	wgmma.commit_group.sync.aligned;
"""  # noqa: E501


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_registers_of_a_product_are_its_own_until_the_wait(timing: Timing) -> None:
    """Ones times what TMA brought, whose rows are pairs of bf16: 0 and the high half of an f32."""
    zeros = "".join(f"	mov.b32 %r{i}, 0;\n" for i in range(20, 24))
    ones = "	mov.b32 %r10, 0x3F803F80;\n"
    place = "	shr.u64 %rd8, %rd3, 4;\n	or.b64 %rd9, %rd8, 4611686293305294848;\n"
    store = "	st.global.b32 [%rd6], %r20;\n"
    wait = "	wgmma.wait_group.sync.aligned 0;\n"
    before = LOAD + WAIT + zeros + ones + place + PRODUCT
    result = run(before + wait + store, timing)[0]
    halves = np.ascontiguousarray(SOURCE[:8, :8]).view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(result, np.tile(halves.sum(axis=1)[::2], 8))
    with pytest.raises(Fault, match="wgmma still uses"):
        run(before + store + wait, timing)


def test_products_whose_registers_are_not_fenced() -> None:
    """Written after the fence, on one of two ways to it, or with no fence at all."""
    fence, write = "	wgmma.fence.sync.aligned;", "	mov.b32 %r20, 0;\n"
    branch = f"	@%p1 bra $L__1;\n{write}$L__1:\n"
    bare = PRODUCT.replace(fence, "")
    found = []
    for body in (write + PRODUCT, branch + PRODUCT, f"{fence}\n{write}{bare}", branch + bare):
        program = parse(KERNEL.format(threads=32, body=body))
        found.append(len(unordered_products(program)))
    assert found == [0, 0, 1, 1]
    again = f"$L__2:\n{PRODUCT}	add.f32 %r21, %r21, %r21;\n	@%p1 bra $L__2;\n"
    assert not unordered_products(parse(KERNEL.format(threads=32, body=write + again)))
    looped = f"	{fence}\n$L__2:\n{bare}	add.f32 %r21, %r21, %r21;\n	@%p1 bra $L__2;\n"
    assert unordered_products(parse(KERNEL.format(threads=32, body=write + looped)))


HOST = """
// -----// IR Dump Before GpuLaunchLoweringPass: gpu-launch-lowering //----- //
module @kernel {
  func.func private @mosaic_gpu_init_tma_desc(!llvm.ptr, !llvm.ptr)
  func.func @kernel_mosaic_gpu(%stream: !llvm.ptr loc(#loc1), %arrays: !llvm.ptr) {
    %0 = llvm.mlir.constant(4096 : i32) : i32
    %1 = llvm.mlir.constant(1 : i64) : i64
    %2 = llvm.mlir.constant(128 : i64) : i64
    %3 = llvm.mlir.constant(64 : i64) : i64
    %4 = llvm.mlir.constant(2 : i64) : i64
    %5 = llvm.mlir.constant(7 : i64) : i64
    %6 = llvm.mlir.constant(0 : i64) : i64
    %7 = builtin.unrealized_conversion_cast %6 : i64 to index
    %8 = builtin.unrealized_conversion_cast %1 : i64 to index
    %9 = llvm.load %arrays : !llvm.ptr -> !llvm.ptr
    %10 = llvm.getelementptr %arrays[3] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr loc(#loc2)
    %11 = llvm.load %10 : !llvm.ptr -> !llvm.ptr
    %12 = llvm.alloca %1 x !llvm.array<128 x i8> {alignment = 64 : i64} : (i64) -> !llvm.ptr
    %sizes = memref.alloca() : memref<2xi64>
    memref.store %2, %sizes[%7] : memref<2xi64>
    memref.store %3, %sizes[%8] : memref<2xi64>
    %strides = memref.alloca() : memref<2xi64>
    memref.store %3, %strides[%7] : memref<2xi64>
    memref.store %1, %strides[%8] : memref<2xi64>
    call @mosaic_gpu_init_tma_desc(%12, %11, %5, %4, %sizes, %strides, %2, %sizes) : () -> ()
    %13 = llvm.load %12 : !llvm.ptr -> !llvm.array<128 x i8>
    gpu.launch_func <%stream : !llvm.ptr> @k::@k blocks in (%2, %1, %1) threads in (%3, %1, %1) : i64 dynamic_shared_memory_size %0 args(%9 : !llvm.ptr, %13 : !llvm.array<128 x i8>)
    return
  }
}
"""  # noqa: E501


def test_a_launch_of_the_host_program() -> None:
    launch = read_launch(HOST)
    descriptor = Descriptor(
        array=3, itemsize=2, sizes=(128, 64), strides=(64, 1), window=(128, 64), swizzle=128
    )
    assert launch == Launch(
        grid=(128, 1, 1), threads=64, shared_memory=4096, arguments=(0, (descriptor,))
    )
    with pytest.raises(ValueError, match=r"llvm\.sdiv"):
        read_launch(HOST.replace("llvm.getelementptr", "llvm.sdiv"))
    with pytest.raises(ValueError, match="no launch"):
        read_launch(re.sub(r" *gpu\.launch_func.*\n", "", HOST))


@pytest.mark.parametrize(
    ("text", "inputs", "result"),
    [
        ("add.s32 %r0, %r1, %r2", (0xFFFFFFFF, 2), 1),
        ("shr.s32 %r0, %r1, 31", (0x80000000, 0), 0xFFFFFFFF),
        ("shr.u32 %r0, %r1, %r2", (0x80000000, 32), 0),
        ("mul.hi.s32 %r0, %r1, %r2", (0xFFFFFFFF, 5), 0xFFFFFFFF),
        ("mul.hi.u32 %r0, %r1, %r2", (0xFFFFFFFF, 5), 4),
        ("mad.lo.s32 %r0, %r1, %r2, 7", (3, 0xFFFFFFFF), 4),
        ("max.s32 %r0, %r1, 0", (0xFFFFFFFF, 0), 0),
        ("prmt.b32 %r0, %r1, %r2, 0x3715", (0x44332211, 0x88776655), 0x44882266),
        ("prmt.b32 %r0, %r1, %r2, 0xF010", (0x44332211, 0x88776655), 0xFF112211),
        ("max.NaN.f32 %r0, %r1, %r2", (0x7FC00000, 0x3F800000), 0x7FC00000),
        ("max.f32 %r0, %r1, %r2", (0x7FC00000, 0x3F800000), 0x3F800000),
        ("ex2.approx.ftz.f32 %r0, %r1", (0x40400000, 0), 0x41000000),
        ("ex2.approx.ftz.f32 %r0, %r1", (0xC3000000, 0), 0),  # 2**-128 is subnormal
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2", (0x3F808000, 0x3F818000), 0x3F803F82),
        ("selp.b32 %r0, %r1, %r2, %p1", (5, 6), 5),
    ],
)
def test_lanes(text: str, inputs: tuple[int, int], result: int) -> None:
    ptx = KERNEL.format(threads=32, body=f"	{text};")
    *_, instruction, _ = parse(ptx).instructions
    registers = {f"%r{i + 1}": np.full(32, x, np.uint32) for i, x in enumerate(inputs)}
    registers["%p1"] = np.full(32, True)
    compute = compile_lanes(instruction, registers)
    assert compute is not None
    with np.errstate(all="ignore"):
        compute(registers)
    assert (registers["%r0"] == result).all(), hex(registers["%r0"][0])


def test_rules_of_descriptors() -> None:
    good = Descriptor(
        array=0,
        itemsize=2,
        sizes=(1000, 8, 64, 64),
        strides=(32768, 4096, 64, 1),
        window=(1, 8, 64, 64),
        swizzle=128,
    )
    assert broken_rules(good) == []
    for field, value, rule in (
        ("sizes", (1 << 31, 8, 64, 64), "int32"),
        ("strides", (32767, 4096, 64, 1), "whole 16 bytes"),
        ("strides", (1 << 39, 4096, 64, 1), "less than 2"),
        ("strides", (32768, 4096, 128, 2), "last stride"),
        ("window", (1, 8, 512, 64), "256 wide"),
        ("window", (1, 8, 64, 4), "rows are whole"),
        ("window", (1, 8, 64, 128), "fit the swizzle"),
        ("swizzle", 48, "hardware"),
    ):
        broken = broken_rules(dataclasses.replace(good, **{field: value}))
        assert any(rule in text for text in broken), (field, value)
