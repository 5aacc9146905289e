"""A process of several that serve one model, for test_processes.py.

    python -m tests.peers INDEX PORT

It reads its orders, one JSON object, from stdin, and ends its stdout with a JSON line of what came.
"""

import dataclasses
import json
import os
import sys
import time
from typing import Any

import numpy as np

DEVICES = 2  # of each process


def main(index: int, port: int, orders: dict[str, Any]) -> None:
    import jax

    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        orders["processes"],
        index,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=20,
    )
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    began = time.perf_counter()
    try:
        found = run(index, orders)
    except Exception as e:
        said = {"error": type(e).__name__, "message": str(e)}
        said["seconds"] = time.perf_counter() - orders.get("began", began)
        print(json.dumps(said), flush=True)
        os._exit(3)  # what still waits for the others would hold the interpreter
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


def run(index: int, orders: dict[str, Any]) -> dict[str, Any]:
    import jax

    import jpaged
    from jpaged import LLM, SamplingParams
    from tests.features import PARAMS, SETTINGS, everything
    from tests.tiny import make_prompts

    settings = dataclasses.replace(
        SETTINGS,
        data_parallel_size=orders.get("replicas", 1),
        tensor_parallel_size=orders["processes"] * DEVICES // orders.get("replicas", 1),
        peer_timeout_s=orders.get("timeout", 120.0),
    )
    # The first process alone knows the prompts.
    prompts = jpaged.broadcast(make_prompts(3, 17, 30, 9) if index == 0 else None)
    if orders["what"] == "everything":
        llm = LLM(PARAMS, **vars(settings))
        return {"found": summary(everything(llm)), "blocks": llm.stats()["num_blocks"]}
    if orders["what"] == "folder":
        llm = LLM(orders["folder"], **vars(settings))
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        return {"found": [out.outputs[0].token_ids for out in outs]}
    if orders["what"] == "prefix store":
        LLM(PARAMS, **vars(dataclasses.replace(settings, prefix_store=orders["store"])))
    if orders["what"] == "guessing":
        return guessing(settings, orders["of"])
    if orders["what"] == "renewed":
        return {"found": renewed(settings)}
    if orders["what"] == "images":
        # Its two heads go to a device of each process.
        devices = [next(x for x in jax.devices() if x.process_index == i) for i in (0, 1)]
        mesh = jax.sharding.Mesh(np.array(devices), ("tp",))
        alone = dataclasses.replace(SETTINGS, peer_timeout_s=settings.peer_timeout_s)
        return images(alone, orders["folder"], mesh)
    if orders["what"] == "structured":
        return {"found": structured(settings)}
    llm = LLM(PARAMS, **vars(settings))
    how = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.generate(prompts, how, use_tqdm=False)  # compiles
    if orders["what"] == "diverge" and index == 1:
        prompts[1] = [*prompts[1][:-1], 7]
    if orders["what"] == "longer" and index == 1:  # a step of another shape
        prompts = [prompt * 2 for prompt in prompts]
    for prompt in prompts:
        llm.add_request(prompt, how)
    print("ready", flush=True)
    orders["began"] = time.perf_counter()
    steps = 0
    while llm.has_unfinished():
        if orders["what"] == "stall" and index == 1 and steps == 4:
            time.sleep(600)
        llm.step()
        steps += 1
        if orders["what"] == "kill":
            time.sleep(0.05)
    return {"steps": steps, "process": jax.process_index()}


def guesses_of(of: str) -> tuple[Any, dict[str, Any]]:
    """Return params, and what guesses for them: their own text, a model with states, or a head."""
    from tests.features import PARAMS
    from tests.heads import head_config
    from tests.recurrent import hybrid
    from tests.tiny import make_params

    speculative: dict[str, Any] = {"num_tokens": 3, "adaptive": False}
    model = PARAMS.config
    if of == "eagle":
        head = make_params(3, head_config(model))
        return PARAMS, {**speculative, "method": "eagle", "model": head}
    if of == "states":
        states = make_params(3, hybrid(vocab_size=model.vocab_size))
        return states, {**speculative, "method": "draft", "model": states}
    return PARAMS, speculative


def guessing(settings: Any, of: str) -> dict[str, Any]:
    """Tokens of prompts that repeat themselves, how many guesses were tried and right, and what is
    refused where clocks decide. of: as of guesses_of.
    """
    from jpaged import LLM, ConfigError, SamplingParams
    from tests.tiny import make_prompts

    params, speculative = guesses_of(of)
    try:
        LLM(params, **vars(settings) | {"speculative": {**speculative, "adaptive": True}})
        refused = ""
    except ConfigError as e:
        refused = str(e)
    llm = LLM(params, **vars(settings) | {"speculative": speculative})
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outs = llm.generate([p * 3 for p in make_prompts(5, 7, 4)], asked, use_tqdm=False)
    stats, tokens = llm.stats(), [out.outputs[0].token_ids for out in outs]
    tried = {name: stats[name] for name in ("drafted_tokens", "accepted_tokens")}
    return {"found": tokens, "tried": tried, "refused": refused}


def renewed(settings: Any) -> list[Any]:
    """Tokens and spans of versions of what runs on under new weights in both modes, of which one is
    cut and goes on.
    """
    from jpaged import LLM, ConfigError, SamplingParams
    from jpaged.runtime.processes import count_of
    from tests.features import PARAMS
    from tests.tiny import make_params, make_prompts

    llm, fresh = LLM(PARAMS, **vars(settings)), make_params(1, PARAMS.config)
    if count_of(llm.session.served.placement.mesh) > 1:
        refused = ""
        try:
            llm.rollout(make_prompts(3), enough=1)
        except ConfigError as e:
            refused = str(e)
        assert "processes" in refused, refused
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found: list[Any] = []
    for mode in ("keep", "recompute"):
        llm.update_params(PARAMS)
        names = [llm.add_request(prompt, asked) for prompt in make_prompts(3, 17, 30, 9)]
        outs = {out.request_id: out for _ in range(8) for out in llm.step()}
        llm.update_params(fresh, mode=mode)
        outs |= {out.request_id: out for _ in range(3) for out in llm.step()}
        cut = llm.abort(names[0])
        assert cut is not None and cut.unfinished is not None
        names[0] = llm.add_request(cut, asked)
        while llm.has_unfinished():
            outs |= {out.request_id: out for out in llm.step()}
        for name in names:
            (done,) = outs[name].outputs
            found.append([done.token_ids, [list(span) for span in done.weight_versions]])
    llm.close()
    return found


def images(settings: Any, folder: str, mesh: Any = None) -> dict[str, Any]:
    """Return tokens and logprobs of prompts with images and with embeddings, and how many images
    were encoded after the first call and after the second, of the same in another order. With a
    mesh over processes, also the error where one has another image, of the same size.
    """
    import jax

    import jpaged
    from jpaged import LLM, EmbeddingSpan, PeerError, SamplingParams

    draw = np.random.default_rng(3)
    pictures = [draw.integers(0, 256, (*size, 3), np.uint8) for size in ((20, 20), (8, 30))]
    rows = np.float32(draw.standard_normal((5, 24)))
    # The first process alone knows the images.
    first, second, rows = jpaged.broadcast((*pictures, rows))
    ids = [3, 4, 18, 17, 19, 9]
    spans = {2: EmbeddingSpan(rows, grid=(1, 1, 5))}
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": ids, "images": [first]},
        {"prompt_token_ids": ids + ids + [7], "images": [second, first]},
        {"prompt_token_ids": list(range(3, 15)), "embeddings": spans},
        {"prompt_token_ids": [5, 6, 7]},
    ]
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    changes = {"images": True, "num_blocks": 96, "swap_space_gib": 0, "max_sampling_mask": 0}
    llm = LLM(folder, mesh=mesh, **vars(settings) | changes)
    found, encoded = list[Any](), list[int]()
    for _ in range(2):
        for out in llm.generate(prompts, asked, use_tqdm=False):
            (answer,) = out.outputs
            found.append([answer.token_ids, answer.token_logprobs.tolist()])
        encoded.append(llm.stats()["images_encoded"])
        prompts[1]["images"] = [first, second]
    error = ""
    if mesh is not None:
        other = first + np.uint8(1 + jax.process_index())
        try:
            llm.generate([{"prompt_token_ids": ids, "images": [other]}], asked, use_tqdm=False)
        except PeerError as e:
            error = str(e)
    llm.close()
    return {"found": found, "encoded": encoded, "error": error}


def structured(settings: Any) -> list[list[int]]:
    """Tokens of answers of a given form, and of one without."""
    from jpaged import LLM, SamplingParams
    from tests.byte_tokenizer import make_tokenizer, params

    llm = LLM(params(), tokenizer=make_tokenizer(), **vars(settings))
    forms: list[Any] = [{"regex": "(the same beginning|another) [a-d]{3}[0-9]*"}, None]
    asked = [SamplingParams(max_tokens=30, seed=i, structured=forms[i % 2]) for i in range(4)]
    outs = llm.generate(["one", "two", "three", "four"], asked, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outs]


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Tokens, ranks and logprobs of everything, as JSON has them."""
    out: dict[str, Any] = {}
    for name, outs in found.items():
        if name == "scores":
            out[name] = [x.tolist() for x in outs]
            continue
        out[name] = [
            [(c.token_ids, c.token_logprobs.tolist(), c.finish_reason) for c in one.outputs]
            for one in outs
        ]
    return out


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.stdin.readline()))
