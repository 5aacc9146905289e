"""Reading compiled HLO: is a donated array (the KV pool) updated in place? What passes between
devices?
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.runtime.kv_cache import PoolSpec

# Results that share their operand's buffer, or name a part of it.
_FREE = {
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "fusion-done",  # of what a fusion-start began
}
_FUSIONS = {"fusion", "fusion-start"}
_IN_PLACE = {"scatter", "dynamic-update-slice"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\((.*)$"
)  # root, result, operation, operands

COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def in_place(compiled: Any, pools: Iterable[PoolSpec]) -> tuple[list[str], bool]:
    """Copies of any pool's whole field in the HLO, and whether temporaries and new outputs are
    smaller than the smallest pool.

    The pools must differ in size, and be larger than any other array of the module.
    """
    text, memory, pools = compiled.as_text(), compiled.memory_analysis(), list(pools)
    assert len({pool.nbytes for pool in pools}) == len(pools)
    fields = [x for pool in pools for x in whole(pool).values()]
    copies = [line for x in fields for line in pool_copies(text, math.prod(x.shape))]
    fresh = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return copies, fresh < min(pool.nbytes for pool in pools)


def whole(pool: PoolSpec) -> dict[str, Any]:
    """All of a pool as ShapeDtypeStructs, by field."""
    return pool.of_rows(pool.num_layers * pool.num_blocks)


def filled(pool: PoolSpec, value: float) -> dict[str, jax.Array]:
    """A pool of one number."""
    return {name: jnp.full(x.shape, value, x.dtype) for name, x in whole(pool).items()}


def forbid_donation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every jitted function keeps its arguments, so that it must copy what it
    changes.
    """
    jit: Callable[..., Any] = jax.jit
    monkeypatch.setattr(jax, "jit", lambda function, *, donate_argnums, **how: jit(function, **how))


def pool_copies(hlo: str, elements: int) -> list[str]:
    """Instructions of a compiled module that make a new array with the pool's element count; empty
    if all is in place.

    A fusion counts as in place where its root is a scatter or a dynamic-update-slice, a kernel
    where a result takes an operand's place: if that had to survive, XLA would have put a copy
    before it, which is then found. Pick a count that no other array of the module has.
    """
    computations: dict[str, list[re.Match[str]]] = {}
    fused: set[str] = set()
    lines: list[re.Match[str]] = []
    for line in hlo.splitlines():
        if start := _COMPUTATION.match(line):
            lines = computations.setdefault(start[1], [])
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction)
            if instruction[3] in _FUSIONS and (called := _called(instruction)):
                fused.add(called)
    assert computations, "no computation found: has the form of HLO text changed?"
    found = []
    for name, instructions in computations.items():
        for i in instructions if name not in fused else ():
            # What runs beside others names its operands in a tuple before its results.
            made = i[2].partition("), ")[2] if i[3] == "fusion-start" else i[2]
            counts = [
                math.prod(int(n) for n in shape.split(",") if n)
                for shape in re.findall(r"\w\[([\d,]*)\]", made)
            ]
            if elements not in counts or i[3] in _FREE | _IN_PLACE:
                continue
            if i[3] == "custom-call" and "output_to_operand_aliasing=" in i[4]:
                continue
            if i[3] in _FUSIONS and _root(computations[_called(i)]) in _IN_PLACE:
                continue
            found.append(i[0].strip())
    return found


def first_operations(hlo: str) -> list[str]:
    """Operations of a compiled module's main computation that wait for no other one."""
    entry = hlo[hlo.index("\nENTRY ") :].splitlines()[2:]
    there, found = set[str](), list[str]()
    for instruction in filter(None, map(_INSTRUCTION.match, entry)):
        name = instruction[0].split(" = ")[0].split()[-1]
        operands = set(re.findall(r"%[\w.\-]+", instruction[4].split(")")[0]))
        if not operands <= there:
            continue
        if instruction[3] in _FREE - {"while", "conditional", "call"} | {"constant"}:
            there.add(name)
        else:
            found.append(name)
    assert there, "nothing found: has the form of HLO text changed?"
    return found


def _called(instruction: re.Match[str]) -> str:
    called = re.search(r"calls=%?([\w.\-]+)", instruction[4])
    return called[1] if called else ""


def _root(instructions: list[re.Match[str]]) -> str:
    """The operation that makes a fusion's result, bitcasts aside."""
    root = next(i for i in instructions if i[1])
    while root[3] == "bitcast":
        operand = re.match(r"%?([\w.\-]+)", root[4])
        assert operand is not None
        root = next(
            i for i in instructions if re.match(rf"\s*(?:ROOT )?%?{re.escape(operand[1])} = ", i[0])
        )
    return root[3]


def in_branches(text: str) -> set[str]:
    """Computations that a conditional may leave out, with all that they call."""
    bodies: dict[str, str] = {}
    for found in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\s*\n(.*?)^\}", text, re.M | re.S):
        bodies[found[1]] = found[2]
    names = r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))"
    pending = {
        name.strip().lstrip("%")
        for found in re.finditer(names, text)
        for name in (found[1] or found[2]).split(",")
    }
    inside: set[str] = set()
    while pending:
        inside.add(name := pending.pop())
        called = re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)", bodies[name])
        pending |= set(called) & bodies.keys() - inside
    return inside


def collectives(text: str) -> tuple[Counter[str], Counter[str]]:
    """How often each occurs: always, and in branches of a conditional."""
    always: Counter[str] = Counter()
    sometimes: Counter[str] = Counter()
    inside, current = in_branches(text), ""
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = start[1]
        elif found := COLLECTIVE.search(line):
            (sometimes if current in inside else always)[found[2]] += 1
    return always, sometimes
