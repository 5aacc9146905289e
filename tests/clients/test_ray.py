"""Ray: datasets through JPagedPredictor, on a local cluster whose actors are killed."""

import asyncio
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, SamplingParams
from jpaged.demo import MODEL_PATH
from jpaged.integrations.batch import BatchRequest, Settings
from tests.clients.local_ray import local_ray

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pa: Any = pytest.importorskip("pyarrow", reason="the extra 'ray' is not installed")
from jpaged.integrations.ray import JPagedPredictor  # noqa: E402

# Ray warns of its own settings, and leaves sockets and processes to the end of the program.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in (
        "DeprecationWarning",
        "FutureWarning",
        "ResourceWarning",
        "pytest.PytestUnraisableExceptionWarning",
    )
]
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "num_blocks": 128,
    "block_size": 8,
    "max_model_len": 96,
    "max_logprobs": 5,
}
SAMPLING = {"temperature": 0.9, "max_tokens": 8}


@pytest.fixture(scope="module")
def predictor() -> JPagedPredictor:
    return JPagedPredictor(
        str(MODEL_PATH), sampling=SAMPLING, id_column="id", sampling_column="sampling", **SMALL
    )


def run(predictor: JPagedPredictor, *batches: Any) -> list[Any]:
    """The answers of batches that an actor has in flight together."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(predictor(batch) for batch in batches))

    return asyncio.run(all_of_them())


def rows(**columns: list[Any]) -> Any:
    count = len(next(iter(columns.values())))
    return pa.table({"id": list(range(count)), "sampling": [None] * count} | columns)


def test_every_form_of_prompt_gives_what_generate_gives(predictor: JPagedPredictor) -> None:
    llm = predictor._llm
    ids = llm.tokenizer.encode("import os")
    chat = [{"role": "user", "content": "def f():"}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = [llm.generate(p, params, use_tqdm=False)[0] for p in ("import os", ids)]
    expected += llm.chat(chat, params, use_tqdm=False)
    greedy = {"temperature": 0.0}
    (texts, tokens, chats) = run(
        predictor,
        rows(prompt=["import os"], sampling=[greedy]),
        rows(prompt=[ids], sampling=[greedy]),
        rows(prompt=[chat], sampling=[greedy | {"max_tokens": 8}]),
    )
    for table, output in zip((texts, tokens, chats), expected, strict=True):
        (row,) = table.to_pylist()
        done = output.outputs[0]
        assert (row["generated_text"], row["generated_token_ids"]) == (done.text, done.token_ids)
        assert (row["finish_reason"], row["completion_tokens"]) == (
            done.finish_reason,
            len(done.token_ids),
        )
        assert (
            row["prompt_tokens"] == len(output.prompt_token_ids)
            and row["error"] is row["error_type"] is None
        )


def test_a_row_that_cannot_run_is_kept_with_its_error_and_inputs_are_not_touched(
    predictor: JPagedPredictor,
) -> None:
    prompts = ["import", None, "", [5, 10**6], 3.5, "x = 1\n" * 200, [{"role": "user"}], "def", "a"]
    sampling = [None] * 7 + [{"temperature": -1.0}, {"colour": 1}]
    batch = {name: np.empty(9, object) for name in ("prompt", "sampling")} | {
        "id": np.arange(9),
        "extra": np.ones(9),
    }
    batch["prompt"][:], batch["sampling"][:] = prompts, sampling
    before = {name: column.copy() for name, column in batch.items()}
    table = run(predictor, batch)[0]
    assert list(batch) == list(before)
    assert all(
        a is b or a == b for name in batch for a, b in zip(batch[name], before[name], strict=True)
    )
    assert table.column_names[:4] == ["prompt", "sampling", "id", "extra"]
    assert table["id"].to_pylist() == list(range(9)) and table["extra"].to_pylist() == [1.0] * 9
    found = list(zip(table["error_type"].to_pylist(), table["error"].to_pylist(), strict=True))
    assert found[0] == (None, None) and table["generated_text"][0].as_py() is not None
    wanted = [
        "NoneType",
        "empty",
        "1000000",
        "float",
        "max_model_len",
        "chat",
        "temperature=-1.0",
        "colour=1",
    ]
    for (kind, message), part in zip(found[1:], wanted, strict=True):
        assert kind in ("RequestError", "CapacityError") and part in message
    assert table["generated_text"].to_pylist()[1:] == [None] * 8
    assert not predictor._llm.has_unfinished() and predictor._done == {}


def test_a_row_gives_the_same_text_in_any_batch_and_the_text_of_its_line(
    predictor: JPagedPredictor,
) -> None:
    prompts = [f"def f{i % 3}(" for i in range(12)]
    whole = run(predictor, rows(prompt=prompts))[0]
    batch = whole.select(["id", "prompt", "sampling"])
    halves = run(predictor, batch[6:], batch[:6])
    texts = whole["generated_text"].to_pylist()
    assert [
        *halves[1]["generated_text"].to_pylist(),
        *halves[0]["generated_text"].to_pylist(),
    ] == texts
    assert len(set(texts)) > 8  # equal prompts of other ids draw otherwise
    line = BatchRequest(number=1)
    settings = Settings(defaults=predictor._llm.default_sampling_params(), overrides=SAMPLING)
    line.parse(b'{"id": 4, "prompt": "def f1("}', settings)
    assert (
        predictor._llm.generate("def f1(", line.params, use_tqdm=False)[0].outputs[0].text
        == texts[4]
    )


def test_without_ids_a_batch_repeats_itself_and_its_equal_prompts_differ() -> None:
    predictor = JPagedPredictor(
        str(MODEL_PATH), sampling=SAMPLING | {"n": 2, "logprobs": 1}, **SMALL
    )
    batch = pa.table({"prompt": ["class A", "class A", "class B", ""]})
    first, again = (run(predictor, batch)[0] for _ in range(2))
    assert first.equals(again)
    a, b, _, failed = first.to_pylist()
    assert len(a["generated_text"]) == 2 and a["generated_text"] != b["generated_text"]
    assert a["completion_tokens"] == sum(map(len, a["generated_token_ids"]))
    for ids, logprobs in zip(a["generated_token_ids"], a["logprobs"], strict=True):
        assert [top[0]["token_id"] for top in logprobs] == ids and all(
            top[0]["logprob"] <= 0 for top in logprobs
        )
    assert failed["generated_text"] is failed["logprobs"] is None and "empty" in failed["error"]


def test_rows_name_their_adapters() -> None:
    """Prompts and conversations; one that is unknown is that row's error."""
    config = jpaged.load_params(str(MODEL_PATH)).config
    lora = jpaged.initial_lora(config, 2, jax.random.key(0))
    lora = jax.tree.map(lambda x: x + 0.2, lora)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    tables: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 2}
    how: dict[str, Any] = {"adapters": {"a": lora}, "adapter_column": "adapter", **tables, **SMALL}
    predictor = JPagedPredictor(str(MODEL_PATH), sampling=greedy, **how)
    chat = [{"role": "user", "content": "def f():"}]
    prompts, names = ["import os", "import os", chat, "import os"], ["a", None, "a", "b"]
    (texts,) = run(predictor, pa.table({"prompt": prompts[:2], "adapter": names[:2]}))
    (chats,) = run(predictor, pa.table({"prompt": prompts[2:3], "adapter": names[2:3]}))
    (bad,) = run(predictor, pa.table({"prompt": prompts[3:], "adapter": names[3:]}))
    llm = predictor._llm
    expected = [
        *llm.generate([{"prompt": "import os", "adapter": "a"}, "import os"], greedy),
        *llm.chat(chat, greedy, adapter="a"),
    ]
    found = [*texts["generated_text"].to_pylist(), *chats["generated_text"].to_pylist()]
    assert found == [out.outputs[0].text for out in expected]
    assert found[0] != found[1]
    assert "adapter 'b' is unknown" in bad["error"][0].as_py()


def test_what_is_wrong_with_every_row_raises() -> None:
    with pytest.raises(ConfigError, match="'colour'"):
        JPagedPredictor(str(MODEL_PATH), sampling={"colour": 1}, **SMALL)
    with pytest.raises(jpaged.RequestError, match="top_p"):
        JPagedPredictor(str(MODEL_PATH), sampling={"top_p": 2.0}, **SMALL)
    predictor = JPagedPredictor(str(MODEL_PATH), sampling=SamplingParams(max_tokens=2), **SMALL)
    with pytest.raises(ConfigError, match="'prompt' is not in the dataset, which has text"):
        run(predictor, pa.table({"text": ["a"]}))
    with pytest.raises(ConfigError, match="'error' is in the dataset already"):
        run(predictor, pa.table({"prompt": ["a"], "error": ["b"]}))


@pytest.fixture(scope="module")
def cluster() -> Any:
    with local_ray(num_cpus=3):
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


def test_a_dataset_whose_actor_is_killed_loses_nothing(
    cluster: None, predictor: JPagedPredictor, tmp_path: Path
) -> None:
    marker = tmp_path / "killed"

    class Mortal(JPagedPredictor):
        """Its first process to come this far is killed in the middle of a batch."""

        steps = 0

        def _step(self, pending: set[str]) -> set[str]:
            self.steps += 1
            if self.steps == 12 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), 9)
            return super()._step(pending)

    prompts = [f"def f{i % 5}(" if i != 17 else "" for i in range(48)]
    ds = ray.data.from_items(
        [{"id": i, "prompt": p} for i, p in enumerate(prompts)], override_num_blocks=6
    )
    how = {"model": str(MODEL_PATH), "sampling": SAMPLING, "id_column": "id", **SMALL}
    answered = ds.map_batches(
        Mortal,
        fn_constructor_kwargs=how,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=4,
        num_cpus=1,
    )
    found = sorted(answered.take_all(), key=lambda row: row["id"])
    assert marker.exists() and [row["id"] for row in found] == list(range(48))
    assert [row["id"] for row in found if row["error"] is not None] == [17]
    expected = run(predictor, rows(prompt=prompts))[0]
    assert [row["generated_text"] for row in found] == expected["generated_text"].to_pylist()
    assert [row["prompt"] for row in found] == prompts


@pytest.mark.parametrize(("blocks", "more"), [(1, {}), (4, {"max_concurrency": 2})])
def test_batches_of_an_actor_overlap(cluster: None, blocks: int, more: dict[str, Any]) -> None:
    class Counting(JPagedPredictor):
        """Adds how many batches the actor had at most when one of them was done."""

        running = most = 0

        async def __call__(self, batch: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            table = await super().__call__(batch)
            self.running -= 1
            return table.append_column("most", pa.array([self.most] * len(table)))

    ds = ray.data.from_items(
        [{"prompt": f"def f{i}("} for i in range(32)], override_num_blocks=blocks
    )
    answered = ds.map_batches(
        Counting,
        fn_constructor_kwargs={"model": str(MODEL_PATH), "sampling": SAMPLING, **SMALL},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=8,
        num_cpus=1,
        **more,
    )
    assert max(row["most"] for row in answered.take_all()) >= 2
