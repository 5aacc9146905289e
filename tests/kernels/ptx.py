"""What the hardware demands of a kernel and no interpreter shows, read from its PTX.

Proxies: wgmma and TMA read and write shared memory through the async proxy, ordinary stores go
through the generic one. What a thread has stored is seen there only after its own
`fence.proxy.async` (PTX ISA, "Async proxy"), and no barrier replaces it.

Registers: a thread block owns what it was launched with, ptxas' registers times its threads.
`setmaxnreg.inc` takes from that pool and waits, for ever if need be, until there is enough.
"""

import re
from collections.abc import Iterator

WARPGROUP = 128  # threads

STORE = re.compile(r"\b(st|stmatrix)\.(?!global|param|local|async)\S*\s+\[(%\w+)")
FENCE = re.compile(r"\bfence\.proxy\.async\b")
# An arrival too: it tells others that they may read.
READ = re.compile(
    r"\bwgmma\.mma_async\b|\bcp\.async\.bulk\.\S*global\.shared\S*|\bmbarrier\.arrive\b"
)
LABEL = re.compile(r"^\s*([$\w]+):")
BRANCH = re.compile(r"^\s*(@\S+\s+)?bra(\.uni)?\s+([$\w]+)")
SCOPED = ("LAB_WAIT", "DONE")  # labels of a wait, which are in a scope of their own


def instructions(ptx: str) -> list[str]:
    return [line.strip() for line in ptx.splitlines() if line.strip()[:2] not in ("", "//")]


def following(lines: list[str]) -> list[list[int]]:
    """Of each line, those that may come next."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    after = []
    for i, line in enumerate(lines):
        branch = BRANCH.match(line)
        if branch is None or branch[3] in SCOPED:
            ends = line.startswith(("ret;", "exit;", "trap;"))
            after.append([] if ends else [i + 1])
        else:
            after.append([labels[branch[3]]] + ([i + 1] if branch[1] else []))
    return [[j for j in js if j < len(lines)] for js in after]


def unfenced(ptx: str) -> list[str]:
    """Lines that a thread may come to with a store to shared memory behind it and no fence since,
    and that let the async proxy, or another thread, read it.
    """
    lines = instructions(ptx)
    after, found, seen = following(lines), set(), set()
    elsewhere = of_parameters(lines)
    stores = ((i, STORE.search(line)) for i, line in enumerate(lines))
    waiting = [j for i, m in stores if m and m[2] not in elsewhere for j in after[i]]
    while waiting:
        i = waiting.pop()
        if i in seen or FENCE.search(lines[i]):
            continue
        seen.add(i)
        if READ.search(lines[i]):
            found.add(i)
        waiting += after[i]
    return [lines[i] for i in sorted(found)]


def of_parameters(lines: list[str]) -> set[str]:
    """Return the registers with addresses of the kernel's arrays: a store that names no memory and
    takes one of these is to global memory.
    """
    sources: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith(("ld.param", "add.s64", "mov.b64", "cvta.")):
            written, *read = re.findall(r"%rd\d+|__dynamic_shmem__\d+", line)
            kind = {"parameter"} if line.startswith("ld.param") else set()
            sources.setdefault(written, set()).update(read, kind)

    def origins(register: str) -> set[str]:
        known, waiting = set(), [register]
        while waiting:
            name = waiting.pop()
            if name not in known:
                known.add(name)
                waiting += sources.get(name, ())
        return known

    def is_of_one(register: str) -> bool:
        known = origins(register)
        is_shared = any(name.startswith("__dynamic") for name in known)
        return "parameter" in known and not is_shared

    return {register for register in sources if is_of_one(register)}


def fences(ptx: str) -> int:
    return len(FENCE.findall(ptx))


def threads(ptx: str) -> int:
    """Of a thread block."""
    match = re.search(r"\.(?:maxntid|reqntid) (\d+), 1, 1", ptx)
    assert match is not None
    return int(match[1])


def asked_registers(ptx: str) -> int | None:
    """That the warpgroups of a block ask for together, all of whom set theirs; None if none does.

    Those that decrease it have code of their own. Those that increase it do too, or all share one.
    """
    found = list(_set_registers(ptx))
    if not found:
        return None
    fewer, more = ([n for kind, n in found if kind == x] for x in ("dec", "inc"))
    others = threads(ptx) // WARPGROUP - len(fewer)
    assert fewer and len(more) in (1, others), found
    return WARPGROUP * (sum(fewer) + sum(more) * (others if len(more) == 1 else 1))


def _set_registers(ptx: str) -> Iterator[tuple[str, int]]:
    for kind, count in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+);", ptx):
        yield kind, int(count)
