"""The flag --adapter NAME=FOLDER of `jpaged serve` and `serve_batch`: adapters by name."""

from pathlib import Path
from typing import TYPE_CHECKING

from jpaged.errors import ConfigError

if TYPE_CHECKING:
    from jpaged.llm import LLM

FLAG = (
    "adapters as PEFT writes them, for lines whose model is NAME; as many in a step as --max-loras "
    "says (default: none)"
)


def folders(flags: list[str] | None) -> dict[str, str]:
    """Return the folder of each name; ConfigError for what is no NAME=FOLDER, or a name twice."""
    named: dict[str, str] = {}
    for flag in flags or ():
        name, _, folder = flag.partition("=")
        if not name or not folder or not Path(folder).is_dir():
            raise ConfigError(f"--adapter {flag}: must be NAME=FOLDER, a folder that exists")
        if name in named:
            raise ConfigError(f"--adapter {flag}: {name} is {named[name]} already")
        named[name] = folder
    return named


def loaded(llm: "LLM", flags: list[str] | None) -> "LLM":
    """Add the adapters of the flag to an LLM, and return it."""
    for name, folder in folders(flags).items():
        llm.add_adapter(name, folder)
    return llm
