"""Stores what lm-eval's "hf" model says of the embedded model: tests/golden/lm_eval.json.

    python tests/golden/make_golden_lm_eval.py    # where torch and lm_eval[hf] can be imported

What is asked is in tests/golden/lm_eval_cases.py; float32 on CPU, one request a batch. Nothing here
is needed to run or to test jpaged: the file is kept in the repository.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "jpaged" / "demo" / "model"
PACKAGES = ("lm_eval", "torch", "transformers", "tokenizers", "datasets")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "lm_eval.json")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    # Imported here: only this environment has them.
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from tests.golden import lm_eval_cases as cases

    model = HFLM(
        pretrained=str(MODEL),
        dtype="float32",
        device="cpu",
        batch_size=1,
        max_length=cases.MAX_LENGTH,
    )
    pairs = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(cases.PAIRS)]
    stored: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
    }
    stored["pairs"] = [list(answer) for answer in model.loglikelihood(pairs)]
    with tempfile.TemporaryDirectory() as folder:
        names = cases.write_tasks(Path(folder))
        found = lm_eval.simple_evaluate(
            model, tasks=names, task_manager=TaskManager(include_path=folder)
        )
    stored["tasks"] = {name: summary(found, name) for name in names}
    args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{args.out}: {len(pairs)} pairs, {len(names)} tasks")
    return 0


def summary(found: dict[str, Any], name: str) -> dict[str, Any]:
    """A task's metrics, and what the model answered to each of its requests."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    metrics = {
        k: v
        for k, v in found["results"][name].items()
        if isinstance(v, float) and "stderr" not in k
    }
    return {"metrics": metrics, "answers": [sample["resps"] for sample in samples]}


if __name__ == "__main__":
    sys.exit(main())
