"""Instructions that compute on the 32 lanes of a warp: integers, floats, conversions, bits.

A register is an unsigned numpy array of 32 values (bool for a predicate), by its name. Literals and
special registers stand among them, under keys that `source` makes, so that all operands are looked
up alike.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.kernels.hopper.program import Instruction, operand_list

LANES = 32
Registers = dict[str, np.ndarray]
Compute = Callable[[Registers], np.ndarray]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
HALVES = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}

INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
}
OPERATIONS = {*INTEGER, *FLOAT, "not", "shl", "shr", "mad", "fma"}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def source(operand: str, bits: int, literals: Registers) -> str:
    """Return the key of an operand; a literal is added to `literals`, which every warp has."""
    if operand.startswith("0f"):
        value = int(operand[2:], 16)
    elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
        value = int(operand, 0)
    else:
        return operand
    key = f"{operand}:{bits}"
    if bits == 1:
        literals[key] = np.full(LANES, bool(value))
    else:
        literals[key] = np.full(LANES, value % (1 << bits), UNSIGNED[bits])
    return key


def compile_lanes(
    instruction: Instruction, literals: Registers
) -> Callable[[Registers], None] | None:
    """Return what an instruction does to all lanes of a warp; None if it is of another kind."""
    opcode, operands = instruction.opcode, instruction.operands
    parts = opcode.split(".")
    name, kind = parts[0], parts[-1]

    def key(i: int, bits: int) -> str:
        return source(operands[i], bits, literals)

    if name == "mov" and (operands[0][0] == "{" or operands[1][0] == "{"):
        return _move_parts(operands, int(kind[1:]), literals)
    compute = _compute(name, kind, parts, operands, key)
    if compute is None:
        return None
    target = operands[0].split("|")[0]

    def run(registers: Registers) -> None:
        registers[target] = compute(registers)

    return run


def _compute(
    name: str,
    kind: str,
    parts: list[str],
    operands: tuple[str, ...],
    key: Callable[[int, int], str],
) -> Compute | None:
    """Return what gives an instruction's result."""
    if name == "setp":
        return _comparison(parts, operands, key)
    if name == "cvt":
        return _conversion(parts[-2], kind, operands, key)
    if name == "shfl":
        return _shuffle(parts, key)
    if name == "prmt":
        return _permutation(key)
    if name == "cvta":
        a = key(1, 64)
        return lambda r: r[a]
    if name == "mov" or name == "selp":
        bits = 1 if kind == "pred" else int(kind[1:])
        a = key(1, bits)
        if name == "mov":
            return lambda r: r[a]
        b, chosen = key(2, bits), operands[3]
        return lambda r: np.where(r[chosen], r[a], r[b])
    if name not in OPERATIONS:
        return None
    if kind == "f32":
        return _float(name, parts, operands, key)
    if kind in HALVES:
        return _halves(name, kind, operands, key)
    if kind == "pred":
        return _integer(name, kind, 1, parts, operands, key)
    if re.fullmatch(r"[usb](8|16|32|64)", kind):
        return _integer(name, kind, int(kind[1:]), parts, operands, key)
    return None


def _integer(
    name: str,
    kind: str,
    bits: int,
    parts: list[str],
    operands: tuple[str, ...],
    key: Callable[[int, int], str],
) -> Compute | None:
    """Return an operation on integers; sums and products wrap."""
    a = key(1, bits)
    is_signed = kind[0] == "s"
    signed, unsigned = (np.bool_, np.bool_) if bits == 1 else (SIGNED[bits], UNSIGNED[bits])
    view = signed if is_signed else unsigned
    if name == "not":
        return lambda r: ~r[a]
    if name == "neg":
        return lambda r: np.negative(r[a].view(signed)).view(unsigned)
    if name in INTEGER:
        operation, b = INTEGER[name], key(2, bits)
        return lambda r: operation(r[a].view(view), r[b].view(view)).view(unsigned)
    if name in ("shl", "shr"):
        shift = np.left_shift if name == "shl" else np.right_shift
        b = key(2, 32)

        def shifted(r: Registers) -> np.ndarray:
            count, x = r[b].astype(np.int64), r[a].view(view)
            most = np.minimum(count, bits - 1).astype(view)
            past_end = x >> view(bits - 1) if is_signed and name == "shr" else view(0)
            return np.where(count < bits, shift(x, most), past_end).view(unsigned)

        return shifted
    if name not in ("mul", "mad"):
        return None
    part, b = parts[1], key(2, bits)
    out_bits = 2 * bits if part == "wide" else bits
    product = _product(part, bits, view)
    if name == "mul":
        return lambda r: product(r[a], r[b])
    c = key(3, out_bits)
    return lambda r: product(r[a], r[b]) + r[c]


def _product(part: str, bits: int, view: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the low or high half of a product of integers, or all of it ("wide")."""
    if part == "lo":
        return lambda x, y: x * y
    if part == "wide":
        wide, out = (SIGNED if view is SIGNED[bits] else UNSIGNED)[2 * bits], UNSIGNED[2 * bits]
        return lambda x, y: (x.view(view).astype(wide) * y.view(view).astype(wide)).view(out)

    def high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        exact = x.view(view).astype(object) * y.view(view).astype(object)
        return np.array([(int(n) >> bits) % (1 << bits) for n in exact], UNSIGNED[bits])

    return high


def _float(
    name: str, parts: list[str], operands: tuple[str, ...], key: Callable[[int, int], str]
) -> Compute | None:
    """Return an operation on f32, rounded once; `approx` ones are computed to full precision."""
    a = key(1, 32)
    flush = "ftz" in parts
    if name == "fma":
        b, c = key(2, 32), key(3, 32)

        def fused(r: Registers) -> np.ndarray:
            x, y, z = (r[i].view(np.float32).astype(np.float64) for i in (a, b, c))
            return (x * y + z).astype(np.float32).view(np.uint32)

        return fused
    operation = FLOAT.get(f"{name}.NaN" if "NaN" in parts else name)
    if operation is None:
        return None
    if len(operands) == 3:
        b = key(2, 32)
        return lambda r: operation(r[a].view(np.float32), r[b].view(np.float32)).view(np.uint32)

    def unary(r: Registers) -> np.ndarray:
        x = r[a].view(np.float32)
        if flush:
            return _flushed(operation(_flushed(x))).view(np.uint32)
        return operation(x).view(np.uint32)

    return unary


def _flushed(x: np.ndarray) -> np.ndarray:
    """Return x with zeros in place of subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _halves(
    name: str, kind: str, operands: tuple[str, ...], key: Callable[[int, int], str]
) -> Compute | None:
    """Return an operation on two 16-bit floats in a register, rounded once."""
    dtype, inputs = HALVES[kind], [key(i, 32) for i in range(1, len(operands))]

    def run(r: Registers) -> np.ndarray:
        x = [np.ascontiguousarray(r[i]).view(dtype).astype(np.float64) for i in inputs]
        if name == "fma":
            result = x[0] * x[1] + x[2]
        else:
            result = FLOAT[name](*x)
        return result.astype(dtype).view(np.uint32)

    return run if name == "fma" or name in FLOAT else None


def _comparison(
    parts: list[str], operands: tuple[str, ...], key: Callable[[int, int], str]
) -> Compute:
    """Return setp: a comparison, and another predicate that it is combined with."""
    kind, compare = parts[-1], COMPARE[parts[1]]
    bits = int(kind[1:])
    view = {"f": np.float32, "s": SIGNED[bits]}.get(kind[0], UNSIGNED[bits])
    a, b = key(1, bits), key(2, bits)
    unordered = parts[1] == "neu"

    def compared(r: Registers) -> np.ndarray:
        x, y = r[a].view(view), r[b].view(view)
        result = compare(x, y)
        if parts[1] == "ne" and kind[0] == "f" and not unordered:
            result &= ~(np.isnan(x) | np.isnan(y))
        return result

    if parts[2] not in COMBINE:
        return compared
    combine, other = COMBINE[parts[2]], operands[3]
    return lambda r: combine(compared(r), r[other])


def _conversion(
    to: str, kind: str, operands: tuple[str, ...], key: Callable[[int, int], str]
) -> Compute | None:
    """Return cvt: between integers, or to and from narrow floats, rounded to the nearest even."""
    if to in HALVES and kind == "f32":
        dtype, high, low = HALVES[to], key(1, 32), key(2, 32)

        def packed(r: Registers) -> np.ndarray:
            pair = np.stack([r[low].view(np.float32), r[high].view(np.float32)], axis=1)
            return pair.astype(dtype).view(np.uint32)[:, 0]

        return packed
    if to == "f16x2" and kind == "e4m3x2":
        a = key(1, 16)
        narrow = ml_dtypes.float8_e4m3fn
        return lambda r: np.ascontiguousarray(r[a]).view(narrow).astype(np.float16).view(np.uint32)
    if to in ("f16", "bf16") and kind == "f32":
        a, dtype = key(1, 32), HALVES[f"{to}x2"]
        return lambda r: r[a].view(np.float32).astype(dtype).view(np.uint16)
    if to == "f32" and kind in ("f16", "bf16"):
        a, dtype = key(1, 16), HALVES[f"{kind}x2"]
        return lambda r: np.ascontiguousarray(r[a]).view(dtype).astype(np.float32).view(np.uint32)
    if to == "f32" and re.fullmatch(r"[us]\d+", kind):
        bits = int(kind[1:])
        a = key(1, bits)
        view = (SIGNED if kind[0] == "s" else UNSIGNED)[bits]
        return lambda r: _low(r[a], bits).view(view).astype(np.float32).view(np.uint32)
    if not (re.fullmatch(r"[us]\d+", kind) and re.fullmatch(r"[us]\d+", to)):
        return None
    bits, out_bits = int(kind[1:]), int(to[1:])
    a = key(1, max(16, bits))
    view = (SIGNED if kind[0] == "s" else UNSIGNED)[bits]
    # A register has 16 bits at least: a narrower result is extended as its type says.
    middle = (SIGNED if to[0] == "s" else UNSIGNED)[out_bits]
    wide = (SIGNED if to[0] == "s" else UNSIGNED)[max(16, out_bits)]
    out = UNSIGNED[max(16, out_bits)]
    return lambda r: _low(r[a], bits).view(view).astype(middle).astype(wide).view(out)


def _low(x: np.ndarray, bits: int) -> np.ndarray:
    return x.astype(UNSIGNED[bits])


def _shuffle(parts: list[str], key: Callable[[int, int], str]) -> Compute:
    """Return shfl.sync among all 32 lanes, to a lane by number or by exclusive or."""
    a, b = key(1, 32), key(2, 32)
    lane = np.arange(LANES)
    if "bfly" in parts:
        return lambda r: r[a][lane ^ r[b].astype(np.int64)]
    assert "idx" in parts, parts
    return lambda r: r[a][r[b].astype(np.int64) % LANES]


def _permutation(key: Callable[[int, int], str]) -> Compute:
    """Return prmt: four bytes chosen among those of two registers, or the sign of one."""
    a, b, c = (key(i, 32) for i in (1, 2, 3))

    def run(r: Registers) -> np.ndarray:
        both = np.stack([r[a], r[b]], axis=1).view(np.uint8)
        chosen = (r[c][:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
        picked = np.take_along_axis(both, (chosen & 7).astype(np.int64), axis=1)
        signs = np.where(picked & 0x80, np.uint8(0xFF), np.uint8(0))
        return np.where(chosen & 8, signs, picked).view(np.uint32)[:, 0]

    return run


def _move_parts(
    operands: tuple[str, ...], bits: int, literals: Registers
) -> Callable[[Registers], None]:
    """Return mov between a register and two of half its width."""
    half = UNSIGNED[bits // 2]
    if operands[0][0] == "{":
        low, high = operand_list(operands[0].strip("{}"))
        whole = source(operands[1], bits, literals)

        def unpack(r: Registers) -> None:
            parts = np.ascontiguousarray(r[whole]).view(half).reshape(LANES, 2)
            r[low], r[high] = parts[:, 0].copy(), parts[:, 1].copy()

        return unpack
    pair = [source(part, bits // 2, literals) for part in operand_list(operands[1].strip("{}"))]
    target = operands[0]

    def pack(r: Registers) -> None:
        both = np.stack([r[part] for part in pair], axis=1)
        r[target] = both.view(UNSIGNED[bits])[:, 0]

    return pack
