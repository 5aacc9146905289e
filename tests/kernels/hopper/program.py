"""The instructions of a kernel, parsed from its PTX."""

import dataclasses
import itertools
import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_REGISTER = re.compile(r"%(?!tid|ctaid|nctaid|ntid|laneid)\w+|\b[Pp]\d*_\d+\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: opcode, operands as they are written, and the predicate that guards it.

    registers: names of all registers that it reads or writes, the predicate among them.
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    registers: frozenset[str]

    def __str__(self) -> str:
        guard = "" if self.predicate is None else f"@{'!' * self.negated}{self.predicate} "
        return f"{guard}{self.opcode} {', '.join(self.operands)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A kernel's instructions in order, and the index of the instruction after each label.

    parameter: what the names of its parameters begin with, before their numbers.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameter: str


def parse(ptx: str) -> Program:
    """Return the program of the one kernel that the text of a PTX module holds."""
    scopes, serial = [""], itertools.count(1)
    declared: dict[str, str] = {}  # scope: a pattern of the names that it declares
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for kind, text in _statements(_body(ptx)):
        if kind == "open":
            scopes.append(f"_{next(serial)}")
            declared[scopes[-1]] = r"\b(LAB_WAIT|DONE)\b"
        elif kind == "close":
            scopes.pop()
        elif text.startswith(".reg"):
            if len(scopes) > 1:  # a name of the scope alone
                name = text.split()[-1]
                declared[scopes[-1]] += rf"|\b({name})\b(?!\.)"
        elif kind == "label" or not text.startswith("."):
            scope = scopes[-1]
            if scope:
                text = re.sub(declared[scope], lambda match: match[0] + scope, text)  # noqa: B023
            if kind == "label":
                labels[text] = len(instructions)
            else:
                instructions.append(_instruction(text))
    parameter = re.search(r"\b\w+_param_(?=0\b)", ptx)
    if parameter is None:
        raise ValueError("a kernel without parameters")
    return Program(instructions=tuple(instructions), labels=labels, parameter=parameter[0])


def unordered_products(program: Program) -> list[Instruction]:
    """Return the wgmma that may use a register which was written since the last wgmma.fence.

    Of the registers of its result and of its first operand, the hardware sees such writes only
    after that fence (PTX ISA, "wgmma.fence").
    """
    written_by = [_written(instruction) for instruction in program.instructions]
    dirty: list[frozenset[str] | None] = [None] * len(program.instructions)
    waiting: list[tuple[int, frozenset[str]]] = [(0, frozenset())]
    while waiting:
        i, arriving = waiting.pop()
        if i >= len(dirty):
            continue
        before = dirty[i]
        if before is not None and arriving <= before:
            continue
        dirty[i] = arriving if before is None else arriving | before
        instruction, after = program.instructions[i], dirty[i] or frozenset()
        if instruction.opcode.startswith("wgmma.fence"):
            after = frozenset()
        elif written_by[i] - after:
            after |= written_by[i]
        if instruction.opcode.startswith("bra"):
            waiting.append((program.labels[instruction.operands[0]], after))
            if instruction.predicate is None:
                continue
        elif instruction.opcode in ("ret", "exit"):
            continue
        waiting.append((i + 1, after))
    return [
        instruction
        for instruction, registers in zip(program.instructions, dirty, strict=True)
        if instruction.opcode.startswith("wgmma.mma_async")
        and registers is not None
        and registers & _fragments(instruction)
    ]


def _written(instruction: Instruction) -> frozenset[str]:
    """Return the registers that an instruction writes at once; wgmma writes its own later."""
    stores = ("st", "wgmma", "cp.", "mbarrier.", "bar.", "bra", "fence", "setmaxnreg", "prefetch")
    if instruction.opcode.startswith(stores) or not instruction.operands:
        return frozenset()
    return frozenset(_REGISTER.findall(instruction.operands[0]))


def never_written(program: Program) -> frozenset[str]:
    """Return the registers that nothing writes: halves of a word that nobody looks at."""
    named = frozenset().union(*(x.registers for x in program.instructions))
    firsts = (x.operands[0] for x in program.instructions if x.operands)
    return named - {name for operand in firsts for name in _REGISTER.findall(operand)}


def _fragments(instruction: Instruction) -> frozenset[str]:
    """Return the registers that a wgmma reads parts of matrices from, and writes them to."""
    braced = (operand for operand in instruction.operands if operand[0] == "{")
    return frozenset(name for operand in braced for name in _REGISTER.findall(operand))


def operand_list(text: str) -> tuple[str, ...]:
    """Return what commas separate, outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _body(ptx: str) -> str:
    """Return what stands between the braces of the kernel, without comments."""
    text = re.sub(r"//[^\n]*", "", ptx)
    start = text.index("{", text.index(".maxntid"))
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : start + match.start()]
    raise ValueError("the kernel has no end")


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Yield ("open" | "close" | "label" | "statement", its text)."""
    i = 0
    while i < len(body):
        if body[i].isspace():
            i += 1
        elif body[i] in "{}":
            yield "open" if body[i] == "{" else "close", ""
            i += 1
        elif (label := _LABEL.match(body, i)) is not None:
            yield "label", label[1]
            i = label.end()
        else:
            end = body.index("\n" if body.startswith(".loc", i) else ";", i)
            yield "statement", body[i:end].strip()
            i = end + 1


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise ValueError(f"no instruction: {text!r}")
    negated, predicate, opcode, operands = match.groups()
    return Instruction(
        opcode=opcode,
        operands=operand_list(operands),
        predicate=predicate,
        negated=bool(negated),
        registers=frozenset(_REGISTER.findall(text)),
    )
