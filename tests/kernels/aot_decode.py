"""What a Hopper card is launched with for a decode step, read from the program that XLA makes.

    python -m tests.kernels.aot_decode

compiles the step of 256 rows of Qwen3-0.6B with 2 and with 3 layers, for a card that is not there,
and prints a JSON line for each: graphs, the pieces that the host launches one after another (where
a loop or a branch lies between two, it waits for the card), kernels, those of them beside the
products, how often the logits are read, and asked: loops and branches at which the host waits for
what the card has computed. A loop of a known number of turns is none.

The step that looks for top_k and top_p is one graph too, reads the logits twice, and launches the
search of rows that these readings do not settle, which reads those rows alone. A dispatch of 8
steps is a loop that the host counts. The controls are the same without the kernels of thresholds
and with a loop that ends early: they must ask. Exit status 1 where anything is otherwise.
"""

import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.shapes import DecodeShape, Sampler
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.served import VOCAB_TILE
from jpaged.runtime.runner import Placement, Runner, choose_for
from scripts._common import MODELS, absent_device, abstract_params, stay_on_cpu

ROWS = 256
THUNKS = "*thunk_sequence_after_thunk_passes.txt"  # that XLA writes of a program
ASKING = re.compile(r"\b(?:while|conditional)\(")
KNOWN = "known_trip_count"
SEARCH = "row_thresholds"
KERNEL = re.compile(r"^\s*\d+: k(?:CustomKernel|CustomCall|Copy)\b(?:.*?\] (\w+))?", re.MULTILINE)
TOP = re.compile(r"^\d+: k", re.MULTILINE)


def launched(thunks: str) -> dict[str, int]:
    """Pieces at the top of a sequence of thunks, kernels in all of it, and those that are neither a
    product nor the sum of the parts that XLA cut one into.
    """
    names = KERNEL.findall(thunks)
    is_product = [name.startswith("gemm") for name in names]
    follows = [False, *is_product[:-1]]
    is_sum = [after and "add" in name for after, name in zip(follows, names, strict=True)]
    return {
        "graphs": len(TOP.findall(thunks)),
        "kernels": len(names),
        "beside": len(names) - sum(is_product) - sum(is_sum),
    }


def asked(hlo: str) -> int:
    """Return the loops and branches of a compiled module at which the host waits for a number of
    the card: all but the loops whose turns XLA has counted.
    """
    lines = [line for line in hlo.splitlines() if ASKING.search(line)]
    return sum(KNOWN not in line for line in lines)


def readings(hlo: str, *shapes: str) -> int:
    """Return how many kernels of a compiled module read all of an array, in any of these shapes;
    such as gather do not, nor does the search of rows that are not settled.
    """
    computations = hlo.split("\n\n")
    fused = (
        head.startswith("%fused")
        and any(shape in head.split("->")[0] for shape in shapes)
        and "gather(" not in body
        for head, _, body in (each.partition("\n") for each in computations)
    )
    lines = [line for line in hlo.splitlines() if "custom-call(" in line and SEARCH not in line]
    calls = re.findall(r"custom-call\(.*operand_layout_constraints=\{([^)]*)\}", "\n".join(lines))
    return sum(fused) + sum(any(x in operands for x in shapes) for operands in calls)


def compiled(
    model: ModelConfig, features: Sampler, folder: Path, steps: int, changes: dict[str, Any]
) -> dict[str, int]:
    """Return the figures of a step. changes: fields of Choices, for a control."""
    settings: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": ROWS, "num_blocks": 300}
    config = EngineConfig(**settings, decode_steps=steps).resolve(model)
    size: dict[str, Any] = {"rows": ROWS, "tables": 1, "steps": steps}
    size["blocks"] = config.max_blocks_per_seq
    bucket = DecodeShape(**size, sampler=features)
    with absent_device("cuda", "sm_90a") as device:
        placement = Placement(mesh=None, axis=None, device=device)
        params = abstract_params(model, "bfloat16", placement.replicated)
        modules = bind(model, params)
        choices = choose_for(model, config, placement, modules)
        choices = dataclasses.replace(choices, **changes)
        runner = Runner(model, config, placement, modules, choices=choices)
        program = runner.compiled.lower(bucket).compile()
    (file,) = folder.glob(THUNKS)
    thunks = file.read_text()
    file.unlink()
    logits = f"f32[{ROWS},{model.vocab_size}]"
    tiles = f"f32[{ROWS},{model.vocab_size // VOCAB_TILE},{VOCAB_TILE}]"
    hlo = program.as_text()
    return launched(thunks) | {"readings": readings(hlo, logits, tiles), "asked": asked(hlo)}


# By name: layers, what is drawn, steps, changes of a control.
CASES: dict[str, tuple[int, Sampler, int, dict[str, Any]]] = {
    "plain, 2 layers": (2, "plain", 1, {}),
    "plain, 3 layers": (3, "plain", 1, {}),
    "filtered, 2 layers": (2, "filtered", 1, {}),
    "filtered, 2 layers, 8 steps": (2, "filtered", 8, {}),
    "control: thresholds by XLA": (2, "filtered", 1, {"one_pass": None}),
    "control: 8 steps, ending early": (2, "plain", 8, {"counts_steps": False}),
}


def is_good(name: str, figures: dict[str, int]) -> bool:
    if name.startswith("control"):
        return figures["asked"] > 0
    if "steps" in name:
        return figures["asked"] == 0
    most = 2 if "filtered" in name else 1
    return (figures["graphs"], figures["asked"]) == (1, 0) and figures["readings"] == most


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        # Read when the plugin is first used.
        dump = f" --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=decode"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + dump
        stay_on_cpu()
        good = True
        for name in names or CASES:
            layers, features, steps, changes = CASES[name]
            model = dataclasses.replace(MODELS["0.6b"], num_layers=layers)
            figures = compiled(model, features, Path(folder), steps, changes)
            good &= is_good(name, figures)
            print(json.dumps({"name": name} | figures), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
