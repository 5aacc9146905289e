"""What a Hopper card is launched with for a decode step, read from the program that XLA makes.

    python -m tests.kernels.aot_decode

compiles the step of 256 rows of Qwen3-0.6B with 2 and with 3 layers, for a card that is not there,
and prints a JSON line for each: graphs, the pieces that the host launches one after another (where
a loop or a branch lies between two, it waits for the card), kernels, those of them beside the
products, and how often the logits are read. The last line is of the step that looks for top_k and
top_p, which must be several graphs and reads them more than once: the control. Exit status 1 where
the plain step is not one, or does.
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
from jpaged.runtime.runner import Placement, Runner
from scripts._common import MODELS, absent_device, abstract_params, stay_on_cpu

ROWS = 256
THUNKS = "*thunk_sequence_after_thunk_passes.txt"  # that XLA writes of a program
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


def readings(hlo: str, shape: str) -> int:
    """Kernels of a compiled module that read all of an array; such as gather do not."""
    computations = hlo.split("\n\n")
    fused = (
        head.startswith("%fused") and shape in head.split("->")[0] and "gather(" not in body
        for head, _, body in (each.partition("\n") for each in computations)
    )
    calls = re.findall(r"custom-call\(.*operand_layout_constraints=\{([^)]*)\}", hlo)
    return sum(fused) + sum(shape in operands for operands in calls)


def compiled(model: ModelConfig, features: Sampler, folder: Path) -> dict[str, int]:
    config = EngineConfig(max_model_len=4096, max_num_seqs=ROWS, num_blocks=300).resolve(model)
    size: dict[str, Any] = {"rows": ROWS, "tables": 1}
    size["blocks"] = config.max_blocks_per_seq
    bucket = DecodeShape(**size, sampler=features)
    with absent_device("cuda", "sm_90a") as device:
        placement = Placement(mesh=None, axis=None, device=device)
        params = abstract_params(model, "bfloat16", placement.replicated)
        runner = Runner(model, config, placement, bind(model, params))
        program = runner.compiled.lower(bucket).compile()
    (file,) = folder.glob(THUNKS)
    thunks = file.read_text()
    file.unlink()
    logits = f"f32[{ROWS},{model.vocab_size}]"
    return launched(thunks) | {"readings": readings(program.as_text(), logits)}


def main() -> int:
    cases: tuple[tuple[int, Sampler], ...] = ((2, "plain"), (3, "plain"), (2, "filtered"))
    with tempfile.TemporaryDirectory() as folder:
        # Read when the plugin is first used.
        dump = f" --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=decode"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + dump
        stay_on_cpu()
        good = True
        for layers, features in cases:
            model = dataclasses.replace(MODELS["0.6b"], num_layers=layers)
            found = compiled(model, features, Path(folder))
            good &= (found["graphs"] == 1) == (features == "plain")
            good &= (found["readings"] == 1) == (features == "plain")
            name = f"decode {features}, {layers} layers"
            print(json.dumps({"name": name} | found), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
