"""Who leans on whom among the faces."""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jpaged
from jpaged import LLM
from jpaged.config import EngineConfig, EngineFields, check_fields

ROOT = Path(__file__).parents[1]


def sources(*folders: str) -> list[str]:
    """Python files below folders of the repository, by their path in it."""
    found = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in found)


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def classes(file: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(ast.parse(read(file))) if isinstance(node, ast.ClassDef))


JPAGED = sources("jpaged")


def imports_of(file: str) -> set[str]:
    """Modules that a file imports from, wherever in it."""
    nodes = list(ast.walk(ast.parse(read(file))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            files = [name for name in names if (ROOT / f"{name.replace('.', '/')}.py").exists()]
            modules |= {*files, *([] if len(files) == len(names) else [node.module])}
    return plain | modules


FACES = ("api", "kept", "llm", "async_llm", "session", "served_model", "served_pool")


def test_faces_know_nothing_of_each_other() -> None:
    for one, other in (("api", "llm"), ("llm", "api")):
        assert f"jpaged.{other}" not in imports_of(f"jpaged/{one}.py")
    below = (
        "session",
        "served_model",
        "served_pool",
        "request/build",
        "request/outputs",
        "engine/engine",
    )
    for file in below:
        assert not imports_of(f"jpaged/{file}.py") & {"jpaged", "jpaged.api", "jpaged.llm"}, file


def test_nothing_inherits_from_a_face() -> None:
    for file in JPAGED:
        for found in classes(file):
            bases = {ast.unparse(base).split(".")[-1] for base in found.bases}
            assert not bases & {"LLM", "Session", "ServedModel", "Pool"}, f"{file}: {found.name}"


def test_faces_reach_into_no_privates() -> None:
    """A name with an underscore is used of `self` alone, or of the file's own functions."""
    for file in FACES:
        for node in ast.walk(ast.parse(read(f"jpaged/{file}.py"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert is_own or node.attr.startswith("__"), f"{file}: {ast.unparse(node)}"


# Arguments of a function that the caller passes too, as in asyncio.to_thread.
CALLED_WITH = {"AsyncLLM.call(args)", "AsyncLLM.prepare(args)"}


def public_functions() -> Iterator[tuple[str, Any]]:
    for name in jpaged.__all__:
        found = getattr(jpaged, name)
        if not inspect.isclass(found):
            yield name, found
        elif not issubclass(found, BaseException):
            for method, function in inspect.getmembers(found, inspect.isfunction):
                if method == "__init__" or not method.startswith("_"):
                    yield f"{name}.{method}", function


def test_public_signatures_are_written_out() -> None:
    """So that editors show what can be passed, and Python refuses the rest by the function's name;
    LLM's engine_config has its names and types from EngineFields.
    """
    left = set()
    for name, function in public_functions():
        for parameter in inspect.signature(function).parameters.values():
            is_bundle = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if is_bundle and parameter.annotation != typing.Unpack[EngineFields]:
                left.add(f"{name}({parameter.name})")
    assert left == CALLED_WITH


def test_an_unknown_name_is_refused_by_the_function_that_was_called() -> None:
    unknown: Any = {"tops": 8}
    functions: tuple[Any, ...] = jpaged.score, LLM.score, LLM.render_chat, jpaged.generate
    for function in functions:
        said = rf"{function.__qualname__}\(\) got an unexpected keyword argument 'tops'"
        with pytest.raises(TypeError, match=said):
            function(None, [[1, 2]], **unknown)


def test_engine_fields_are_those_of_engine_config() -> None:
    of_config = typing.get_type_hints(EngineConfig)
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    of_fields = typing.get_type_hints(EngineFields)
    assert list(of_fields) == names
    for name in ("speculative", "image_limits"):  # a dict may stand for them
        wider = of_fields.pop(name)
        assert set(typing.get_args(of_config.pop(name))) < set(typing.get_args(wider))
    assert of_fields == of_config


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_num_seq", "did you mean 'max_num_seqs'?"),
        ("gpu_memory_utilization", "did you mean 'memory_utilization'?"),
        ("kv_cache_type", "did you mean 'kv_cache_dtype'?"),
        ("zzz", "'zzz' is not a setting of LLM; EngineConfig has max_model_len, "),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(name: str, said: str) -> None:
    with pytest.raises(jpaged.ConfigError) as caught:
        check_fields([name, "block_size"])
    assert said in str(caught.value)


HOST = sorted(
    file.relative_to(ROOT).as_posix()
    for file in [
        *(ROOT / "jpaged").glob("*.py"),
        *(
            file
            for folder in ("request", "engine", "search", "structured")
            for file in (ROOT / "jpaged" / folder).rglob("*.py")
        ),
    ]
)
# At most, in signatures of host files. Lower it when one gets a type; PyTree and the other names in
# jpaged/types.py are for what has many.
MOST_ANY = 23


def any_of(source: str) -> int:
    """Return how often the signatures of a file say Any."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
            for annotation in [*(arg.annotation for arg in arguments), node.returns]:
                names = () if annotation is None else ast.walk(annotation)
                count += sum(isinstance(n, ast.Name) and n.id == "Any" for n in names)
    return count


def test_signatures_of_host_files_have_types() -> None:
    counts = {file: count for file in HOST if (count := any_of(read(file)))}
    assert sum(counts.values()) <= MOST_ANY, counts


def test_any_is_counted_in_every_place_of_a_signature() -> None:
    source = "async def f(a: Any, *b: Any, c: dict[str, Any], **d: int) -> Any: x: Any = 1"
    assert any_of(source) == 4 and any_of("x: Any = 1") == 0
