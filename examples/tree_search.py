"""Best-first search over lines of code on the embedded model: `python examples/tree_search.py`.

A node is a program so far, its children are samples of the next line. Children share their parent's
KV twice: the samples of one expansion are forks (SamplingParams(n=)), and an expansion finds the
blocks of its whole path in the prefix cache, however long ago they were computed. A line that does
not parse is cut off. The node with the highest mean log-probability a token is expanded next; the
search ends with the first programs that are long enough.
"""

import argparse
import dataclasses
import heapq

from grpo import parses

import jpaged
from jpaged.demo import MODEL_PATH

PROMPT = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A program so far. logprob: of all tokens after the prompt."""

    token_ids: list[int]
    text: str
    lines: int = 0
    tokens: int = 0
    logprob: float = 0.0

    @property
    def score(self) -> float:
        return self.logprob / max(self.tokens, 1)


def expand(
    llm: jpaged.LLM, node: Node, width: int, max_tokens: int
) -> tuple[list[Node], jpaged.RequestOutput]:
    """The distinct children whose code so far parses, and the request that made them."""
    sampling = jpaged.SamplingParams(
        n=width, max_tokens=max_tokens, stop="\n", include_stop_str_in_output=True
    )
    out = llm.generate(node.token_ids, sampling, use_tqdm=False)[0]
    children = {}
    for c in out.outputs:
        text = node.text + (c.text or "")
        if c.finish_reason == "stop" and text.endswith("\n") and is_prefix(text):
            child = Node(
                token_ids=node.token_ids + c.token_ids,
                text=text,
                lines=node.lines + bool((c.text or "").strip()),
                tokens=node.tokens + len(c.token_ids),
                logprob=node.logprob + c.cumulative_logprob,
            )
            children.setdefault(text, child)
    return list(children.values()), out


def is_prefix(text: str) -> bool:
    """Whether code up to an end of line is Python, or would be with the body that its last line may
    open.
    """
    last = text.rstrip("\n").split("\n")[-1]
    indent = len(last) - len(last.lstrip())
    return parses(text) or parses(text + " " * (indent + 4) + "pass\n")


def search(
    llm: jpaged.LLM, *, width: int, lines: int, expansions: int, max_tokens: int
) -> tuple[list[Node], float]:
    """Programs of `lines` lines after the prompt, best first, and the share of prompt tokens found
    in the cache.
    """
    assert llm.tokenizer is not None
    queue = [(0.0, 0, Node(token_ids=llm.tokenizer.encode(PROMPT), text=PROMPT))]
    found: list[Node] = []
    made = cached = given = 0
    for _ in range(expansions):
        if not queue or len(found) >= width:
            break
        _, _, node = heapq.heappop(queue)
        children, out = expand(llm, node, width, max_tokens)
        cached, given = cached + out.num_cached_tokens, given + len(out.prompt_token_ids)
        for child in children:
            if child.lines >= lines:
                found.append(child)
            else:
                made += 1  # breaks ties, so that nodes are never compared
                heapq.heappush(queue, (-child.score, made, child))
    return sorted(found, key=lambda n: -n.score), cached / max(given, 1)


def main(argv: list[str] | None = None) -> list[Node]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=8, help="samples an expansion (default: 8)")
    parser.add_argument("--lines", type=int, default=4, help="lines to write (default: 4)")
    parser.add_argument("--expansions", type=int, default=60, help="at most (default: 60)")
    args = parser.parse_args(argv)
    llm = jpaged.LLM(MODEL_PATH, max_model_len=256, max_num_seqs=16, block_size=8)
    found, hits = search(
        llm, width=args.width, lines=args.lines, expansions=args.expansions, max_tokens=32
    )
    print(f"{len(found)} programs; {hits:.0%} of the paths' tokens were in the cache")
    for node in found[:3]:
        print(f"\n--- {node.score:.2f} nats a token\n{node.text}", end="")
    return found


if __name__ == "__main__":
    main()
