"""The process of a Trial: compiles each form that it is sent, a line of JSON each, and answers with
an empty line. Run as a file, it needs nothing of jpaged.
"""

import json
import math
import resource
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

STACK_BYTES = 1 << 20  # the least that a thread has where the form will be used is twice as much


def serve(limits: Mapping[str, Any], seconds: int) -> None:
    """Compile what comes, and make the mask of its first token."""
    from llguidance import (  # pyright: ignore[reportMissingImports]
        LLMatcher,
        LLParserLimits,
        LLTokenizer,
    )

    tokenizer, limited = LLTokenizer("byte"), LLParserLimits(**limits)
    print(flush=True)
    for line in sys.stdin:
        # The system ends the process at this second of its own.
        last = math.ceil(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (last, resource.RLIM_INFINITY))
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limited)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(flush=True)


def main(limits: Mapping[str, Any], seconds: int, most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # others know no such limit
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(limits, seconds))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
