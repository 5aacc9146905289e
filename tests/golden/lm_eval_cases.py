"""What lm-eval's models are asked in make_golden_lm_eval.py and in tests/clients/test_lm_eval.py:
three local tasks and requests at the edges. Nothing here imports jpaged: the script runs beside
torch.
"""

import json
from pathlib import Path

MAX_LENGTH = 64  # tokens that the models read: the long texts below are past it
CHOICES = [
    {"q": "import os\nimport ", "a": "sys", "b": "banana", "gold": 0},
    {"q": "def __init__(self", "a": "):", "b": " the", "gold": 0},
    {"q": "for i in ", "a": "(((", "b": "range", "gold": 1},
    {"q": "if x is not ", "a": "None:", "b": "purple", "gold": 0},
    {"q": "    return ", "a": "return return", "b": "self", "gold": 1},
]
TEXTS = [
    "import os\n\n\ndef main():\n    print('hello')\n",
    "class Node:\n    def __init__(self, value, parent=None):\n        self.value = value\n" * 3,
    "x",
]
CONTEXTS = ["def read(path):\n    ", "import ", "class A:\n" + "    def f(self): return 1\n" * 12]
LONG = "self.assertEqual(a, b)\n" * 20
# (context, continuation)
PAIRS = [
    ("", "import os"),
    ("", "<|im_end|>import os"),  # the prefix token itself
    ("import os\nimport ", "sys"),
    ("import os \n ", "x"),  # spaces at the end move to the continuation
    (LONG, "self.assertTrue(x)"),
    (LONG, LONG[:120]),
    ("", LONG[:150]),
]
STOP = ["\n\n", "("]
TASKS = ("jpaged_choice", "jpaged_text", "jpaged_complete")


def write_tasks(folder: Path) -> list[str]:
    """Writes the three tasks (YAML) and their documents (JSONL) into a folder; returns the tasks'
    names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bodies = {
        "jpaged_choice": (
            CHOICES,
            "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{[a, "
            "b]}}'\ndoc_to_target: gold\n"
            "target_delimiter: ''\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        ),
        "jpaged_text": (
            [{"text": text} for text in TEXTS],
            "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
            "metric_list:\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
        ),
        "jpaged_complete": (
            [{"text": text, "answer": "self"} for text in CONTEXTS],
            "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{answer}}'\n"
            f"generation_kwargs:\n  until: {json.dumps(STOP)}\n  do_sample: false\n  "
            "max_gen_toks: 12\n"
            "metric_list:\n  - metric: exact_match\n",
        ),
    }
    for name, (documents, body) in bodies.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        head = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
            f"{data}\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(head + body)
    return list(bodies)
