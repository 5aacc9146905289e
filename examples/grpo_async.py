"""Asynchronous GRPO: `python examples/grpo_async.py`.

The model, the reward and the update are those of grpo_nnx.py, the loop is another: the device waits
neither for the longest completion nor for a verifier. Groups run in threads, whose requests join
one batch; an update takes the groups that have ended, while the others run; and the new weights
come under these, which go on by them at their next token (mode="keep"). So a completion may be by
several versions of the weights. `weight_versions` says which token is of which, and the ratio of
the loss is to the probability with which each token was drawn: what is too stale is clipped.

With `--ahead 0` the same lines are the synchronous loop, which runs as many groups as an update
takes and waits for all. `--compare` runs both in turn, several times, and `--plot` shows reward
over wall time.
"""

import argparse
import dataclasses
import itertools
import json
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from grpo_nnx import (
    ENGINE,
    GROUPS,
    SAMPLES,
    SAMPLING,
    advantages,
    arrays_of,
    make,
    prompts_of,
    reward,
    served,
    update,
)

import jpaged

Group = tuple[jpaged.RequestOutput, list[float]]


def train(
    updates: int, *, ahead: int = GROUPS, verify_s: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    """Return a record an update. ahead: groups that run beside those of an update. verify_s: what a
    verifier takes to judge a completion.
    """
    model, optimizer = make(seed=seed)
    rows = (GROUPS + ahead) * SAMPLES
    config = dataclasses.replace(ENGINE, max_num_seqs=rows, seq_buckets=(rows,))
    llm = jpaged.LLM(served(model), **vars(config))
    llm.warmup(use_tqdm=False)

    def judged(completion: jpaged.CompletionOutput) -> float:
        time.sleep(verify_s)
        return reward(completion)

    def run(number: int) -> Group:
        (prompt,) = prompts_of(1, number)
        out = llm.generate(prompt, SAMPLING, seed=number, use_tqdm=False)[0]
        return out, list(verifiers.map(judged, out.outputs))

    history, running, began = list[dict[str, Any]](), set[Future[Group]](), time.perf_counter()
    numbers = itertools.count(seed * 10**6)
    with ThreadPoolExecutor(GROUPS + ahead) as pool, ThreadPoolExecutor(rows) as verifiers:
        for step in range(updates):
            running |= {
                pool.submit(run, next(numbers)) for _ in range(GROUPS + ahead - len(running))
            }
            done = set[Future[Group]]()
            while len(done) < GROUPS:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                done |= ended
            taken = list(done)[:GROUPS]
            running |= done - set(taken)
            outs, judgements = zip(*[future.result() for future in taken], strict=True)
            arrays, rewards = arrays_of(outs), np.array(judgements, np.float32)
            loss = update(model, optimizer, arrays, advantages(rewards))
            jax.block_until_ready(nnx.state(model))  # rollouts go on meanwhile
            lags = (llm.weight_version - arrays["weight_versions"])[arrays["completion_mask"]]
            llm.update_params(served(model), mode="keep")
            record = {"update": step, "reward": float(rewards.mean()), "loss": float(loss)}
            record |= {"lag": float(lags.mean()), "most_lag": int(lags.max())}
            history.append(record | {"seconds": time.perf_counter() - began})
    llm.close()
    return history


def seconds_to(history: list[dict[str, Any]], goal: float, window: int = 5) -> float:
    """Return when the mean reward of `window` updates came to a goal; infinity where it did not."""
    for i in range(window, len(history) + 1):
        if np.mean([record["reward"] for record in history[i - window : i]]) >= goal:
            return history[i - 1]["seconds"]
    return float("inf")


def plot(runs: dict[str, list[list[dict[str, Any]]]], path: Path, window: int = 5) -> None:
    """Draw the mean reward of the last updates over wall time, a line a run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for (name, histories), color in zip(runs.items(), ("tab:gray", "tab:blue"), strict=True):
        for i, history in enumerate(histories):
            rewards = [record["reward"] for record in history]
            smooth = np.convolve(rewards, np.ones(window) / window, "valid")
            seconds = [record["seconds"] for record in history][window - 1 :]
            axes.plot(seconds, smooth, color=color, label=None if i else name)
    axes.set(xlabel="seconds", ylabel=f"mean reward of {window} updates")
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, list[list[dict[str, Any]]]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--ahead", type=int, default=GROUPS, help="groups beside an update's")
    parser.add_argument("--verify-s", type=float, default=0.0, help="what a verifier takes")
    parser.add_argument("--compare", type=int, default=0, help="rounds of both loops, in turn")
    parser.add_argument("--goal", type=float, default=0.7, help="the reward that is waited for")
    parser.add_argument("--plot", type=Path, help="draw the runs here (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="write one record an update here")
    args = parser.parse_args(argv)
    runs: dict[str, list[list[dict[str, Any]]]] = {"synchronous": [], "asynchronous": []}
    for seed in range(max(args.compare, 1)):
        for name, ahead in (("synchronous", 0), ("asynchronous", args.ahead)):
            if args.compare or ahead == args.ahead:
                history = train(args.updates, ahead=ahead, verify_s=args.verify_s, seed=seed)
                runs[name].append(history)
                lag = np.mean([record["lag"] for record in history])
                print(
                    f"{name}: {len(history)} updates in {history[-1]['seconds']:.1f} s, reward "
                    f"{args.goal} after {seconds_to(history, args.goal):.1f} s, at the end "
                    f"{history[-1]['reward']:.3f}; a token's lag {lag:.2f} updates in the mean, "
                    f"{max(record['most_lag'] for record in history)} at most"
                )
    if args.json:
        lines = [
            {"loop": name, "round": i, **record}
            for name, histories in runs.items()
            for i, history in enumerate(histories)
            for record in history
        ]
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if args.plot:
        plot(runs, args.plot)
    return runs


if __name__ == "__main__":
    main()
