"""Soak the host over the mock device: random histories of `HostMachine` until so many engine steps
are done.

    python -m tests.engine.soak --depth 1 --steps 125000              # in one shell
    python -m tests.engine.soak --depth 2 --steps 125000 --seed 1000  # in another

A run takes the seeds from `--seed` on, one for every 100 histories, so that runs whose seeds are
far apart share no history and can go on side by side. Prints a line a seed, and at the end what
has happened how often. Exit status: 0, or 1 after the history that failed and its seed.
"""

import argparse
import sys
import time
import traceback
from collections import Counter

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.test_machine import HostMachine

HISTORIES, RULES = 100, 80  # histories a seed; rules a history, at most
PHASES = (hypothesis.Phase.generate, hypothesis.Phase.shrink)  # shrinking takes up to 5 minutes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--depth", type=int, choices=(1, 2), default=2, help="steps in flight (default: 2)")
    add("--steps", type=int, default=125_000, help="engine steps, at least (default: 125000)")
    add("--seed", type=int, default=0, help="the first seed (default: 0)")
    args = parser.parse_args(argv)
    seen, seed, began = Counter[str](), args.seed, time.perf_counter()
    settings = hypothesis.settings(
        max_examples=HISTORIES,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.filter_too_much,
        ],
    )
    while seen["engine steps"] < args.steps:
        machine = type(f"HostMachine{args.depth}", (HostMachine,), {"depth": args.depth})
        machine.seen = seen
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
        except Exception:
            traceback.print_exc()
            print(f"soak: depth {args.depth}, seed {seed}", file=sys.stderr)
            return 1
        minutes = (time.perf_counter() - began) / 60
        print(f"{minutes:7.2f} minutes, seed {seed}: {seen['engine steps']} steps", flush=True)
        seed += 1
    print(f"ok, depth {args.depth}:", ", ".join(f"{n} {name}" for name, n in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
