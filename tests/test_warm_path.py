"""What a reader of one warm `generate` meets: the project's files and functions that it enters, and
the frames between it and the compiled step.
"""

import dataclasses
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jpaged
from jpaged.models.params import initial_tree
from tests.tiny import CONFIG, ENGINE

ROOT = Path(__file__).parents[1]
OURS = ("jpaged", "kernels_cpu", "kernels_pallas")

# At most. Lower them when a path gets shorter; what needs to raise them should be no detour.
FILES, FUNCTIONS, FRAMES = 33, 200, 6
# Of the faces and what a request passes there, without engine, models and runtime.
HOST_FILES, HOST_FUNCTIONS = 12, 55
BELOW = ("jpaged/engine/", "jpaged/models/", "jpaged/runtime/", "kernels_")


@dataclasses.dataclass
class Trace:
    """functions: (file, qualified name) of each that was called. frames: the functions on the stack
    from the first one to each call of a compiled step, that one excluded.
    """

    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    frames: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


def file_of(frame: FrameType) -> str | None:
    """Return the file of a function of the project, relative to its root; None for any other."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT)
    return file.as_posix() if file.parts[0] in OURS else None


def traced(function: Any) -> Trace:
    """Call a function, and return what of the project it calls in this thread."""
    trace, stack = Trace(), list[FrameType]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code is jax.stages.Compiled.__call__.__code__:
                trace.frames.append([frame.f_code.co_qualname for frame in stack])
            elif (file := file_of(frame)) is not None:
                trace.functions.add((file, frame.f_code.co_qualname))
                stack.append(frame)
        elif event == "return" and stack and stack[-1] is frame:
            stack.pop()

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert not stack
    return trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return the trace of a warm call, for which nothing is compiled."""
    params = jpaged.Params(initial_tree(CONFIG, nnx.Rngs(0), jnp.float32), CONFIG)
    greedy = jpaged.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    def generate() -> None:
        prompts = [[5, 6, 7, 8, 9]]
        (output,) = jpaged.generate(params, prompts, greedy, config=CONFIG, engine_config=ENGINE)
        assert len(output.outputs[0].token_ids) == 3

    generate()
    generate()
    return traced(generate)


pytestmark = pytest.mark.own_steps


def test_the_warm_path_is_short(trace: Trace) -> None:
    assert ("jpaged/engine/engine.py", "Engine.step") in trace.functions
    assert len(trace.files) <= FILES, sorted(trace.files)
    assert len(trace.functions) <= FUNCTIONS, sorted(trace.functions)


def test_the_host_part_of_it_is_short(trace: Trace) -> None:
    host = {(file, name) for file, name in trace.functions if not file.startswith(BELOW)}
    assert ("jpaged/session.py", "Session.generate") in host
    assert len({file for file, _ in host}) <= HOST_FILES, sorted(host)
    assert len(host) <= HOST_FUNCTIONS, sorted(host)


def test_a_step_is_few_frames_below_generate(trace: Trace) -> None:
    assert len(trace.frames) >= 2, "a prefill with its draw, and a decode"
    for frames in trace.frames:
        assert frames[0] == "generate" and "Engine.step" in frames
        assert len(frames) <= FRAMES, " > ".join(frames)


def test_a_file_and_a_frame_more_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a step that is called through a function of another file."""
    step = jax.jit(lambda x: x + 1).lower(1).compile()
    files = {"a": "def a(step): return step(1)", "b": "def b(step): return a(step)"}
    (tmp_path / "jpaged").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    functions: dict[str, Any] = {}
    for name, source in files.items():
        path = tmp_path / "jpaged" / f"{name}.py"
        exec(compile(source, str(path), "exec"), functions)
    one, two = traced(lambda: functions["a"](step)), traced(lambda: functions["b"](step))
    assert one.frames == [["a"]] and two.frames == [["b", "a"]]
    assert one.files == {"jpaged/a.py"} and two.files == {"jpaged/a.py", "jpaged/b.py"}
