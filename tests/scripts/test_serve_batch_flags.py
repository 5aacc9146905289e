"""The flags of scripts/serve_batch.py: files of them, their help, the dry run, error styles and
error rates.
"""

import argparse
import dataclasses
import io
import json
import os
import pty
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.config import EngineConfig, Speculative
from jpaged.images.limits import ImageLimits
from jpaged.integrations.batch import command as serve_batch
from tests.batch_engine import ROOT, FakeLLM, serve


def openai(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    )
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestHelp:
    def test_every_flag_is_told_with_its_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        parser = serve_batch.make_parser()
        groups = [group.title for group in parser._action_groups if group._group_actions]
        assert len(groups) == 15  # six of the engine; --help stands alone
        for action in parser._actions:
            if action.dest not in ("help", "input"):
                assert action.help and "(default: " in action.help and action.help.endswith(")"), (
                    action.dest
                )
                told = re.search(r"\(default: ([^:,)]*)", action.help)
                if told is not None and type(action.default) in (int, float):
                    assert told[1] == (
                        f"{action.default:g}" if action.type is float else str(action.default)
                    )
        with pytest.raises(SystemExit) as caught:
            serve_batch.main(["--help"])
        out = capsys.readouterr().out
        assert caught.value.code == 0 and all(str(group).split(",")[0] in out for group in groups)


# A value of each field of EngineConfig that is not its default, as a command line has it.
SETTINGS: dict[str, tuple[list[str], Any]] = {
    "max_model_len": (["--max-model-len", "100"], 100),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "48"], 48),
    "block_size": (["--block-size", "16"], 16),
    "num_blocks": (["--num-blocks", "9"], 9),
    "num_states": (["--num-states", "9"], 9),
    "memory_utilization": (["--memory-utilization", "0.5"], 0.5),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "max_n": (["--max-n", "4"], 4),
    "swap_space_gib": (["--swap-space-gib", "1.5"], 1.5),
    "swap_min_tokens": (["--swap-min-tokens", "0"], 0),
    "prefix_store": (["--prefix-store", "some/folder"], "some/folder"),
    "prefix_store_policy": (["--prefix-store-policy", "write_through"], "write_through"),
    "prefix_store_gib": (["--prefix-store-gib", "2.5"], 2.5),
    "dtype": (["--dtype", "float32"], "float32"),
    "quantization": (["--quantization", "int8"], "int8"),
    "quantized_activations": (["--quantized-activations", "int16"], "int16"),
    "kv_cache_dtype": (["--kv-cache-dtype", "fp8"], "fp8"),
    "images": (["--images"], True),
    "max_image_tokens": (["--max-image-tokens", "64"], 64),
    "image_cache_gib": (["--image-cache-gib", "0.25"], 0.25),
    "image_limits": (["--image-limits", '{"max_side": 99}'], ImageLimits(max_side=99)),
    "max_loras": (["--max-loras", "3"], 3),
    "max_lora_rank": (["--max-lora-rank", "4"], 4),
    "lora_extra": (["--lora-extra", "head", "experts"], ("head", "experts")),
    "attention": (["--attention", "xla"], "xla"),
    "token_buckets": (["--token-buckets", "16", "48"], (16, 48)),
    "seq_buckets": (["--seq-buckets", "8"], (8,)),
    "decode_steps": (["--decode-steps", "4"], 4),
    "stream_steps": (["--stream-steps", "2"], 2),
    "max_logprobs": (["--max-logprobs", "5"], 5),
    "max_logit_bias": (["--max-logit-bias", "6"], 6),
    "max_sampling_mask": (["--max-sampling-mask", "8"], 8),
    "max_embeddings": (["--max-embeddings", "64"], 64),
    "max_stop_ids": (["--max-stop-ids", "7"], 7),
    "strict": (["--strict"], True),
    "structured_output": (["--structured-output"], True),
    "speculative": (
        ["--speculative", '{"method": "ngram", "num_tokens": 3}'],
        Speculative(method="ngram", num_tokens=3),
    ),
    "separate_draw": (["--separate-draw"], True),
    "deterministic": (["--deterministic"], True),
    "mixed": (["--mixed"], True),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "data_parallel_size": (["--data-parallel-size", "4"], 4),
    "tensor_axis": (["--tensor-axis", "none"], None),
    "routed_experts": (["--routed-experts"], True),
    "expert_parallel": (["--expert-parallel"], True),
    "peer_timeout_s": (["--peer-timeout-s", "9.5"], 9.5),
    "compilation_cache_dir": (["--compilation-cache-dir", "none"], None),
}


class TestEngineFlags:
    """Every field of EngineConfig is a flag, and its value arrives in the engine."""

    def given(self, monkeypatch: pytest.MonkeyPatch, *flags: str) -> EngineConfig:
        seen: list[EngineConfig] = []

        def llm(model: Any, *, seed: int, **fields: Any) -> None:
            seen.append(EngineConfig(**fields))

        monkeypatch.setattr("jpaged.LLM", llm)
        serve_batch.make_llm(serve_batch.parse_args(["in.jsonl", *flags]))
        return seen[0]

    def test_the_table_has_every_field(self) -> None:
        """The table above is this test's own: the flags are made of the fields themselves."""
        fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
        flags = {action.dest: action for action in serve_batch.make_parser()._actions}
        assert fields.keys() <= flags.keys()
        assert all(flags[name].help for name in fields)
        assert SETTINGS.keys() == fields.keys(), "give a new field a value here"

    @pytest.mark.parametrize("name", SETTINGS)
    def test_it_arrives(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        flags, value = SETTINGS[name]
        assert getattr(EngineConfig(), name) != value
        assert self.given(monkeypatch, *flags) == EngineConfig(**{name: value})

    def test_none_is_given_none_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.given(monkeypatch) == EngineConfig()

    def test_from_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "token_buckets: [16, 48]\nmax_num_batched_tokens: 48\nstrict: true\nblock-size: 8\n"
        (tmp_path / "c.yaml").write_text(text + "swap_min_tokens: 9\n")
        flags = ("--config", str(tmp_path / "c.yaml"), "--block-size", "16")
        found = self.given(monkeypatch, *flags)
        sizes = {"token_buckets": (16, 48), "max_num_batched_tokens": 48, "swap_min_tokens": 9}
        assert found == EngineConfig(block_size=16, strict=True, **sizes)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--memory-utilization", "3"], "memory_utilization=3.0: must be in (0, 1]"),
            (["--dtype", "int8"], "dtype='int8': must be float32"),
            (["--attention", "magic"], "--attention: invalid choice: 'magic'"),
            (["--max-model-len", "x"], "--max-model-len: invalid int value: 'x'"),
            (["--token-buckets", "64", "16"], "must be positive and strictly ascending"),
        ],
    )
    def test_what_cannot_be(self, flags: list[str], said: str, capsys: Any) -> None:
        with pytest.raises(SystemExit) as caught:
            serve_batch.main(["in.jsonl", *flags])
        err = capsys.readouterr().err
        assert caught.value.code == 1 and said in err and err.count("\n") == 1


class TestConfig:
    def parse(
        self, tmp_path: Path, text: str, *argv: str, name: str = "batch.yaml"
    ) -> argparse.Namespace:
        (tmp_path / name).write_text(text)
        return serve_batch.parse_args([*argv, "--config", str(tmp_path / name)])

    def refused(self, capsys: Any, *args: Any, **kwargs: Any) -> str:
        with pytest.raises(SystemExit) as caught:
            self.parse(*args, **kwargs)
        err = capsys.readouterr().err
        assert caught.value.code == 1 and err.startswith("serve_batch: ") and err.count("\n") == 1
        return err

    def test_flags_by_name_and_those_given_win(self, tmp_path: Path) -> None:
        text = (
            "input: in.jsonl\nmax_tokens: 5\ntop-p: 0.5\nordered: true\nprefix_caching: "
            "false\ncolumns: [a, b=c]\n"
        )
        text += "resume: true\noutput: out.jsonl\nmodel: null\n"
        args = self.parse(tmp_path, text, "--max-tokens", "7", "--no-ordered", "--overwrite")
        assert (args.input, args.max_tokens, args.top_p, args.ordered) == (
            "in.jsonl",
            7,
            0.5,
            False,
        )
        assert (args.enable_prefix_caching, args.columns, args.model) == (False, ["a", "b=c"], None)
        assert (args.existing, args.overrides) == ("overwrite", {"max_tokens": 7, "top_p": 0.5})
        assert self.parse(tmp_path, text, "other.jsonl").input == "other.jsonl"
        assert self.parse(tmp_path, '{"input": "-", "seed": 3}', name="batch.json").seed == 3
        guesses = self.parse(tmp_path, "input: '-'\nspeculative: {method: ngram, num_tokens: 3}")
        assert guesses.engine_config.speculative == Speculative(method="ngram", num_tokens=3)

    def test_what_cannot_be(self, tmp_path: Path, capsys: Any) -> None:
        assert "'temprature' is not a flag; the flags are input, " in self.refused(
            capsys, tmp_path, "temprature: 1", "-"
        )
        assert "batch.yaml: argument --max-tokens: invalid int" in self.refused(
            capsys, tmp_path, "max-tokens: x", "-"
        )
        assert "must be a mapping" in self.refused(capsys, tmp_path, "- a", "-")
        assert "batch.json: " in self.refused(capsys, tmp_path, "{", "-", name="batch.json")
        assert "batch.yaml: " in self.refused(capsys, tmp_path, "a: [", "-")
        assert "'check' is 3: must be true or false" in self.refused(
            capsys, tmp_path, "check: 3", "-"
        )
        assert "'config' is not a flag" in self.refused(capsys, tmp_path, "config: x", "-")
        assert "give an input" in self.refused(capsys, tmp_path, "seed: 3")

    def test_a_run(self, tmp_path: Path) -> None:
        source, output = write(tmp_path / "in.jsonl", {"prompt": "abc"}), tmp_path / "out.jsonl"
        (tmp_path / "c.yaml").write_text(f"input: {source}\noutput: {output}\nmax_tokens: 2\n")
        assert serve("--config", tmp_path / "c.yaml") == 0
        assert read(output)[0]["text"] == "AB"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shard", "3/3"], "--shard 3/3: must be I/N"),
        (["--shard", "x"], "--shard x: must be I/N"),
        (["--grace", "-1"], "--grace -1.0: must be at least 0"),
        (["--grace", "inf"], "--grace inf: must be at least 0, and at most "),
        (["--summary", "none/s.json"], "--summary none/s.json: no such folder"),
        (["--max-error-rate", "1"], "--max-error-rate 1.0"),
        (["--retry-failed"], "--retry-failed needs --resume"),
        (["--resume"], "--resume needs the --output"),
        (["--max-line-bytes", "0"], "--max-line-bytes 0: must be at least 1"),
    ],
)
def test_flags_that_cannot_work(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve_batch.main(["in.jsonl", *flags])
    assert caught.value.code == 1 and said in capsys.readouterr().err


def test_shards_of_slurm() -> None:
    def of(**values: int) -> Any:
        return serve_batch.parse_shard(
            None, {f"SLURM_ARRAY_TASK_{k}": str(v) for k, v in values.items()}
        )

    assert of() is None and of(ID=4, MIN=4, COUNT=1) is None
    assert of(ID=0, MIN=0, MAX=3, COUNT=4) == (0, 4) and of(ID=4, MIN=1, COUNT=4) == (3, 4)
    assert of(ID=20, MIN=10, STEP=5, COUNT=3) == (2, 3)
    assert (
        serve_batch.parse_shard("0/1", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"})
        is None
    )


def test_samples_and_unknown_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"prompt": "ab", "n": 3, "lable": 1},
        openai("a", prompt="cd", n=2, lable=2),
        {"prompt": "ef"},
        {**openai("b", prompt="gh"), "note": "x", "\x1b[2J": "y"},
        openai("c", prompt="x" * 70, truncate_prompt_tokens=-1),
        openai("d", prompt="xyz", truncate_prompt_tokens=2, cache_salt="s"),
    ]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert serve(source, "--output", output, "--ordered") == 2
    assert [
        (("error" in x and x["error"]) or x["response"]["body"]["error"])["code"]
        for x in read(output)[:2]
    ] == ["unknown_field", "unknown_field"]
    capsys.readouterr()
    assert serve(source, "--output", output, "--ordered", "--ignore-unknown", "--overwrite") == 0
    bare, batch, one, _, cut, last = read(output)
    assert bare["choices"] == [
        {"index": i, "text": "AB", "finish_reason": "stop", "stop_reason": None} for i in (0, 1, 2)
    ]
    body = batch["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "CD"), (1, "CD")]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert one["text"] == "EF" and "choices" not in one
    assert (
        cut["response"]["body"]["usage"]["prompt_tokens"] == 64 - 16
    )  # room for the 16 tokens of the answer
    assert last["response"]["body"]["choices"][0]["text"] == "YZ"
    told = "ignored      unknown fields lable (2 lines), note (1 lines), '\\x1b[2J' (1 lines)"
    assert told in capsys.readouterr().out
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert (
        summary["ignored_fields"] == {"lable": 2, "note": 1, "'\\x1b[2J'": 1}
        and summary["finish_reasons"]["stop"] == 8
    )
    assert summary["lines"] == {
        "done": 6,
        "ok": 6,
        "failed": 0,
        "earlier_ok": 0,
        "earlier_failed": 0,
        "total": 6,
    }
    assert (
        summary["tokens"]["in"] == 2 + 2 + 2 + 2 + 48 + 2
        and summary["completion_tokens"]["max"] == 16
    )


def test_printed_samples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve(write(tmp_path / "in.jsonl", {"prompt": "ab", "n": 2})) == 0
    assert (
        capfd.readouterr().out.count("--- answer (stop, 2 prompt tokens from the cache)\nAB\n") == 2
    )


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
VLLM = [  # as vLLM's documentation and tests have them, and its extra fields
    openai(
        "request-1",
        "/v1/chat/completions",
        model="meta-llama/Meta-Llama-3-8B-Instruct",
        max_completion_tokens=9,
        messages=[{"role": "user", "content": "Hello world!"}],
    ),
    openai(
        "request-2",
        "/v1/chat/completions",
        model="m",
        max_tokens=30,
        top_k=5,
        min_p=0.05,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7],
        chat_template_kwargs={"enable_thinking": False},
        length_penalty=1.0,
        use_beam_search=False,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        include_stop_str_in_output=False,
        echo=False,
        add_generation_prompt=True,
        continue_final_message=False,
        priority=0,
        request_id="abc",
        return_token_ids=True,
        logprobs=True,
        top_logprobs=0,
        stream=False,
        add_special_tokens=None,
        structured_outputs=None,
        cache_salt="salt",
        reasoning_effort="low",
        return_tokens_as_token_ids=True,
        include_reasoning=True,
        user="me",
        bad_words=[],
        tool_choice="none",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    ),
    openai("request-4", "/bad_url", messages=[]),
    openai(
        "request-5",
        "/v1/chat/completions",
        stream="True",
        messages=[{"role": "user", "content": "Hello world!"}],
    ),
    openai("request-6", "/v1/moderations", input="You are a helpful assistant."),
]


def test_a_file_made_for_vllm(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", *VLLM, b"{torn"), tmp_path / "out.jsonl"
    llm: Any = FakeLLM()
    step = llm.step

    def with_logprobs() -> Any:
        (out,) = step()
        for done in out.outputs:
            done.logprobs = [{} for _ in done.token_ids]
        return [out]

    llm.step = with_logprobs
    assert serve(source, "--output", output, "--ordered", "--error-style", "vllm", llm=llm) == 2
    first, second, *errors, torn = read(output)
    for line in (
        first,
        second,
        *errors,
    ):  # the fields of vLLM's BatchRequestOutput, and of its response
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
    choice = first["response"]["body"]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("HELLO WOR", "length")
    assert first["response"]["body"]["model"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert (
        second["response"]["body"]["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"
    )
    assert second["response"]["body"]["prompt_token_ids"][0] == 97
    messages, variables = llm.conversations[1]
    assert (
        messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
        and messages[2]["tool_call_id"] == "1"
    )
    assert variables["enable_thinking"] is False and variables["reasoning_effort"] == "low"
    assert variables["tools"][0]["function"]["name"] == "f"
    for line, name in zip(errors, ("request-4", "request-5", "request-6"), strict=True):
        assert (line["custom_id"], line["response"]["status_code"], line["response"]["body"]) == (
            name,
            400,
            None,
        )
        error = line["error"]["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400) and set(error) >= {
            "message",
            "param",
        }
    assert torn["response"] is None and torn["error"]["line"] == 6
    assert serve(source, "--output", output, "--ordered", "--overwrite", llm=FakeLLM()) == 2
    broken, failed = read(output)[1:3]  # this engine gives no logprobs though they were asked for
    assert broken["response"]["status_code"] == 500
    assert failed["error"] is None
    assert set(failed["response"]["body"]["error"]) == {"message", "type", "param", "code"}
    assert failed["response"]["body"]["error"]["code"] == "unsupported_url"


def test_a_hopeless_run_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "a"} if i % 2 else {"promt": "a"} for i in range(1000)]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    flags = ("--output", output, "--window", "4")
    assert serve(source, *flags, "--max-error-rate", "0.4") == 3
    done = read(output)
    captured = capsys.readouterr()
    assert 100 <= len(done) <= 110 and "above --max-error-rate 0.4" in captured.err
    assert re.search(
        r"errors +\d+ unknown_field|errors +\d+ invalid_value \(line 1, 3, 5, 7, 9, \.\.\.\)",
        captured.out,
    )
    assert json.loads((tmp_path / "out.jsonl.summary.json").read_text())["status"] == "hopeless"
    assert serve(source, *flags, "--max-error-rate", "0.6", "--resume") == 2
    assert sorted(number(x) for x in read(output)) == [*range(1, 1001)]


def number(row: dict[str, Any]) -> int:
    return row["line"] if "line" in row else row["error"]["line"]


def test_over_long_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b" * 5000}, {"prompt": "c"})
    assert serve(source, "--output", tmp_path / "out", "--max-line-bytes", "100", "--ordered") == 2
    found = read(tmp_path / "out")
    assert found[1]["error"]["code"] == "line_too_long" and found[1]["response"] is None
    assert [x.get("text") for x in found] == ["A", None, "C"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        "id",
        "custom_id",
        "method",
        "url",
        "body",
        "prompt",
        "messages",
        "prompt_token_ids",
        "n",
        "stop",
        "seed",
        "model",
        "temperature",
        "logprobs",
        "logit_bias",
        "chat_template_kwargs",
        "tools",
        "max_tokens",
        "truncate_prompt_tokens",
    ]
)
BAD_LINES = st.one_of(
    st.binary(min_size=1, max_size=40)
    .map(lambda raw: raw.replace(b"\n", b" "))
    .filter(lambda raw: not raw.isspace()),
    JSON.map(json.dumps).map(str.encode),
    st.dictionaries(FIELDS, JSON, max_size=4).map(json.dumps).map(str.encode),
    st.dictionaries(FIELDS, JSON, max_size=4).map(
        lambda body: json.dumps({**openai("x"), "body": body}).encode()
    ),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(BAD_LINES, min_size=40, max_size=40), st.sampled_from(["openai", "vllm"]))
def test_hundreds_of_malformed_lines(tmp_path: Path, lines: list[bytes], style: str) -> None:
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert serve(source, "--output", output, "--overwrite", "--error-style", style) in (0, 2)
    numbers = sorted(
        x["line"] if "line" in x else int(x["id"].rpartition("_")[2]) for x in read(output)
    )
    assert numbers == [i for i, line in enumerate(lines, 1) if not line.isspace()]


class TestCheck:
    def check(self, *flags: Any) -> int:
        return serve_batch.main([str(f) for f in flags] + ["--check"])

    def test_the_shipped_prompts(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jpaged.LLM", None)
        assert self.check(ROOT / "examples" / "prompts.jsonl") == 0
        out, err = capsys.readouterr()
        assert "lines          16 (16 can run, 0 errors)" in out and not err
        assert re.search(r"prompts +min \d+, median \d+, p99 \d+, max \d+ tokens", out)
        limit = sum(
            x.get("max_tokens") or x["body"].get("max_tokens") or x["body"]["max_completion_tokens"]
            for x in map(json.loads, (ROOT / "examples" / "prompts.jsonl").read_text().splitlines())
        )
        assert f"592 in, at most {limit:,} out" in out
        assert "time           not known: --rates" in out
        assert re.search(r"  weights +0.005 GiB", out) and "KV pool" in out

    def test_errors_and_shards(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = [
            {"prompt": "a", "n": 2, "max_tokens": 8},
            b"{",
            {"prompt": "word " * 2000},
            {"prompt": "b", "n": 999},
        ]
        source = write(
            tmp_path / "in.jsonl",
            *lines,
            b"{",
            {"messages": [{"role": "user", "content": "hi"}], "x": 1},
        )
        assert (
            self.check(source, "--rates", "100", "--ignore-unknown", "--max-model-len", "128") == 2
        )
        out = capsys.readouterr().out
        assert "lines          6 (2 can run, 4 errors)" in out
        assert "2 invalid_json (line 2, 5)" in out and "1 context_length_exceeded (line 3)" in out
        assert (
            "1 invalid_value (line 4)" in out and "ignored        unknown fields x (1 lines)" in out
        )
        assert re.search(r"at most 1s at 100 output tok/s \(as given\)", out)
        assert self.check(source, "--shard", "0/5", "--output", tmp_path / "out.jsonl") == 2
        assert "lines          2 (1 can run, 1 errors)" in capsys.readouterr().out
        assert not list(tmp_path.glob("out*"))

    def test_rates_of_an_earlier_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, output = (
            write(tmp_path / "in.jsonl", *[{"prompt": "ab"}] * 4),
            tmp_path / "out.jsonl",
        )
        assert serve(source, "--output", output) == 0
        capsys.readouterr()
        assert self.check(source, "--output", output) == 0
        out = capsys.readouterr().out
        assert re.search(
            r"0s if answers are as long as there \(mean 2 tokens\), at most .* over the 4 "
            r"answers of",
            out,
        )
        assert self.check(source, "--rates", tmp_path / "none") == 1
        assert self.check(source, "--rates", "-3") == 1
        assert "must be above 0" in capsys.readouterr().err

    def test_a_damaged_input_and_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "in.jsonl.gz"
        path.write_bytes(b"\x1f\x8b")
        assert (
            self.check(path) == 2
            and "cannot read the input any further: EOFError" in capsys.readouterr().err
        )
        assert self.check(write(tmp_path / "in", {"prompt": "a"}), "--model", tmp_path) == 1
        assert "cannot plan for" in capsys.readouterr().err


def test_the_offer_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = (
        write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}),
        tmp_path / "out.jsonl",
    )
    assert serve(source, "--output", output) == 0
    output.write_text(output.read_text().splitlines(keepends=True)[0])

    def answer(text: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        raw = open(theirs, "r+b", buffering=0)  # noqa: SIM115
        with io.TextIOWrapper(raw, write_through=True) as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", terminal)
            patch.setattr(sys, "stderr", terminal)
            os.write(ours, text.encode())
            status = serve(source, "--output", output)
            said = os.read(ours, 1 << 16).decode()
        os.close(ours)
        return status, said

    status, said = answer("q\n")
    assert (
        status == 1
        and "Resume it, overwrite it, or quit? [R/o/q]" in said
        and len(read(output)) == 1
    )
    assert answer("\n")[0] == 0
    assert sorted(x["text"] for x in read(output)) == ["A", "B"]
