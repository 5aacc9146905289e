"""Adapters of a batch run: NAME=FOLDER on the command line, `model: NAME` in a line."""

from pathlib import Path
from typing import Any

from jpaged.integrations.batch.source import BatchError

FLAG = (
    "adapters as PEFT writes them, for lines whose model is NAME; as many in a step as --max-loras "
    "says (default: none)"
)


def folders(given: list[str] | None) -> dict[str, str]:
    """The folder of each name; BatchError where one is no NAME=FOLDER or comes twice."""
    found: dict[str, str] = {}
    for text in given or ():
        name, _, folder = text.partition("=")
        if not name or not folder or not Path(folder).is_dir():
            raise BatchError(f"--adapter {text}: must be NAME=FOLDER, a folder that exists")
        if name in found:
            raise BatchError(f"--adapter {text}: {name} is {found[name]} already")
        found[name] = folder
    return found


def loaded(llm: Any, given: list[str] | None) -> Any:
    """The LLM with the adapters of the flag."""
    for name, folder in folders(given).items():
        llm.add_adapter(name, folder)
    return llm
