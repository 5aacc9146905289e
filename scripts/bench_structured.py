"""Answers of a given form: whether they are, and what the masks cost.

    python scripts/bench_structured.py --documents 1000        # the embedded model, each validated
    python scripts/bench_structured.py --documents 1000 --suite FOLDER     # tests/draft2020-12
    python scripts/bench_structured.py --cost --random 60m     # rows in turn free and under masks
    python scripts/bench_structured.py --cost --random 60m --vocabulary 151936

--documents draws documents of several schemas at temperature 1, until that many have ended by
themselves, and validates each with jsonschema. With --suite the schemas are those of the official
suite (jsonschema's source distribution has it too, below json/), each of which is served or
refused. --cost times rows without a form, rows within a long string of a form, and records, in a
random order in each turn; it prints the median time of each, the median of the ratios within a
turn, by the clock and in time of processors, and the time of the masks.
"""

import argparse
import collections
import dataclasses
import json
import re
import statistics
import sys
import time
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import _common as common
import numpy as np

import jpaged
from jpaged.demo import MODEL_PATH
from jpaged.models.params import random_params

TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, Any] = {
    "record": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "tags": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "score", "tags"],
        "additionalProperties": False,
    },
    "call": {
        "type": "object",
        "properties": {
            "function": {"enum": ["get_weather", "search_documents", "send_message"]},
            "arguments": {
                "type": "object",
                "properties": {
                    "location": TEXT,
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["location", "unit", "days"],
                "additionalProperties": False,
            },
        },
        "required": ["function", "arguments"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": ["integer", "null", "boolean"]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "options": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
            "date": {"type": "string", "format": "date"},
            "size": {"enum": ["s", "m", "l", 4, None]},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
                "items": False,
                "minItems": 2,
            },
        },
        "required": ["id"],
        "additionalProperties": False,
    },
}
LONG = {"regex": "[a-z ]{1000}"}  # a form in which no token is certain


def suite(folder: Path) -> dict[str, Any]:
    """Return the schemas of the official suite's files, by file and description."""
    return {
        f"{file.stem}: {case['description']}": case["schema"]
        for file in sorted(folder.glob("*.json"))
        for case in json.loads(file.read_text())
    }


def documents(schemas: dict[str, Any], count: int, args: argparse.Namespace) -> int:
    """Draw until this many documents have ended, and print how many are valid. Return the number of
    those that are not.
    """
    settings: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": args.rows}
    llm = jpaged.LLM(str(MODEL_PATH), num_blocks=8 * args.rows, max_model_len=512, **settings)
    counts, drawn = collections.Counter[tuple[str, str]](), 0
    began, tokens, left = time.perf_counter(), 0, list(schemas)
    while (todo := count - sum(counts[name, kind] for name, kind in counts if kind in ENDED)) > 0:
        places = range(drawn, drawn := drawn + todo)
        names = [left[i % len(left)] for i in places]
        asked = [
            jpaged.SamplingParams(
                max_tokens=args.max_tokens,
                seed=i,
                structured={
                    "json_schema": json.dumps(schemas[name]),
                    "disable_any_whitespace": i % 3 != 0,
                },
            )
            for i, name in zip(places, names, strict=True)
        ]
        prompts = [f"{name} = " for name in names]
        outs = llm.generate(prompts, asked, on_error="return", use_tqdm=False)
        tokens += sum(len(out.outputs[0].token_ids) for out in outs)
        counts += judged(schemas, names, outs)
        left = [n for n in left if not counts[n, "refused"] and not counts[n, UNJUDGED]]
    kinds = (*ENDED, "cut off", "refused", UNJUDGED)
    if len(schemas) <= len(SCHEMAS):
        for name in schemas:
            print(f"{name:8} " + ", ".join(f"{counts[name, kind]} {kind}" for kind in kinds))
    total = {kind: sum(n for (_, k), n in counts.items() if k == kind) for kind in kinds}
    served = len({name for name, kind in counts if kind in ENDED})
    print(f"{len(schemas)} schemas: {len(left)} not refused, {served} of which ended a document")
    print(", ".join(f"{n} {kind}" for kind, n in total.items()))
    print(
        f"{drawn} documents, {tokens} tokens in {llm.stats()['dispatches']} dispatches and "
        f"{time.perf_counter() - began:.1f} s, compiles included"
    )
    return total["INVALID"]


ENDED, UNJUDGED = ("valid", "INVALID"), "without a judge"


def exact(text: str) -> Any:
    """Parse JSON with decimal numbers: 0.3 is a multiple of 0.0001, which it is not as a float."""

    def number(digits: str) -> int | Decimal:
        value = Decimal(digits)
        is_whole = value.adjusted() < 400 and value == value.to_integral_value()
        return int(value) if is_whole else value

    return json.loads(text, parse_float=number)


def judged(
    schemas: dict[str, Any], names: list[str], outs: list[Any]
) -> collections.Counter[tuple[str, str]]:
    """Return how many documents of each schema are valid, were cut off, or were refused."""
    import jsonschema  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    counts = collections.Counter[tuple[str, str]]()
    for name, out in zip(names, outs, strict=True):
        answer, kind = out.outputs[0], "cut off" if out.error is None else "refused"
        if answer.finish_reason == "stop":
            try:
                judge = jsonschema.Draft202012Validator(exact(json.dumps(schemas[name])))
                with localcontext(prec=1000):
                    judge.validate(exact(answer.text or ""))
                kind = "valid"
            except (ValueError, jsonschema.ValidationError) as e:
                kind = "INVALID"
                print(f"{name}: {answer.text!r}: {str(e).splitlines()[0]}")
            # A pattern of ECMAScript that Python does not know, or a number with a huge exponent.
            except (re.error, InvalidOperation):
                kind = UNJUDGED
        counts[name, kind] += 1
    return counts


def prefix_tokenizer(size: int) -> Any:
    """Return a byte-level tokenizer with this many tokens: beginnings of words in Python's own
    library.
    """
    import os

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from jpaged.models.hf_defaults import import_transformers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = dict.fromkeys(alphabet), []
    for file in sorted(Path(os.__file__).parent.rglob("*.py")):
        for word in re.findall(r"[ _.(]?[A-Za-z0-9]{2,14}", file.read_text(errors="ignore")):
            word = word.replace(" ", "\u0120")
            for end in range(2, len(word) + 1):
                if len(tokens) < size - 1 and word[:end] not in tokens:
                    tokens[word[:end]] = None
                    merges.append((word[: end - 1], word[end - 1]))
        if len(tokens) >= size - 1:
            break
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast: Any = import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, eos_token="<eos>")


def cost(args: Any) -> None:
    """Print the milliseconds of a step, free and under masks, and their ratio."""
    model = common.model_config(args)
    if args.vocabulary is not None:
        model = dataclasses.replace(model, vocab_size=args.vocabulary)
    tokenizer = prefix_tokenizer(model.vocab_size)
    params = random_params(model, dtype=args.dtype or "bfloat16")
    llm = jpaged.LLM(
        params,
        tokenizer=tokenizer,
        max_model_len=256,
        max_num_seqs=2 * args.rows,  # room to compute certain tokens side by side
        num_blocks=args.rows * 8,
        enable_prefix_caching=False,
    )
    settings: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
    nested = {"json_schema": SCHEMAS["record"]}
    kinds: dict[str, Any] = {"free": None, "long string": LONG, "records": nested}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 900, 16).tolist() for _ in range(args.rows)]
    times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for turn in range(args.rounds + 1):
        for kind in rng.permutation(list(kinds)):  # since the last one leaves its data in caches
            settings["structured"] = kinds[kind]
            asked = [jpaged.SamplingParams(seed=i, **settings) for i in range(args.rows)]
            before, began, used = llm.stats(), time.perf_counter(), time.process_time()
            outs = llm.generate(prompts, asked, use_tqdm=False)
            seconds, used = time.perf_counter() - began, time.process_time() - used
            after = llm.stats()
            drawn = sum(len(out.outputs[0].token_ids) for out in outs)
            masks = after["mask_time_s"] - before["mask_time_s"]
            if turn:
                times[kind].append((1e3 * seconds / drawn, 1e3 * masks / drawn, used / drawn))
    print(f"{common.model_name(args)}, vocabulary {model.vocab_size}, {args.rows} rows")
    for kind, samples in times.items():
        median, masks, _ = (statistics.median(values) for values in zip(*samples, strict=True))
        ratio, _, used = np.median(np.array(samples) / np.maximum(times["free"], 1e-12), axis=0)
        print(
            f"{kind:12} {median * args.rows:8.2f} ms for a token of each row, {ratio:5.3f} of "
            f"free rows' time and {used:5.3f} of their processor time; masks "
            f"{masks * args.rows:6.2f} ms"
        )


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_structured", __doc__)
    common.add_model_flags(parser)
    add = parser.add_argument
    add("--documents", type=int, help="number of documents of the embedded model to validate")
    add("--suite", type=Path, help="folder of schemas to use in place of the script's four")
    add("--cost", action="store_true", help="time rows under masks beside free ones")
    add("--vocabulary", type=int, help="tokens of the random model, in place of its own number")
    add("--rows", type=int, default=32)
    add("--tokens", type=int, default=48, help="of each row and round of --cost")
    add("--max-tokens", type=int, default=240, help="of a document")
    add("--rounds", type=int, default=5)
    add("--dtype", help="float32 or bfloat16")
    args = parser.parse_args(argv)
    if (args.documents is None) != args.cost:
        parser.error("give either --documents or --cost")
    common.check_positive(parser, args, "documents", "rows", "tokens", "rounds", "vocabulary")
    if args.documents is not None:
        schemas = SCHEMAS if args.suite is None else suite(args.suite)
        return int(documents(schemas, args.documents, args) > 0)
    common.check_model_flags(parser, args)
    cost(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
