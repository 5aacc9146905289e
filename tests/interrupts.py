"""KeyboardInterrupt at a chosen one of the places at which a signal may strike a thread."""

import contextlib
import dis
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# After these the interpreter looks whether a signal came.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")


@contextlib.contextmanager
def interrupt_at(place: int, *modules: ModuleType) -> Iterator[None]:
    """KeyboardInterrupt at the given one of these places in the code of some modules, counted from
    0; in this thread alone.
    """
    left, last = place, dict[Any, int]()
    files = {module.__file__ for module in modules}

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            code = frame.f_code.co_code
            before, last[frame] = last.get(frame), frame.f_lasti
            if before is not None and dis.opname[code[before]].startswith(LOOKS):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt  # which ends the tracing too
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
