"""Hold random graphs to all laws for some minutes: python tests/laws/hunt.py --minutes 60 --seed 1

Prints every broken law with the smallest graph that breaks it, and the number of drawn graphs at the end.
"""

import argparse
import random
import time
from collections import Counter

from costgraph import testing
from costgraph.ops.registry import KINDS


def strategies():
    """Return the strategies to alternate: graphs of several sizes, nested loops and kernels, one op kind each."""
    yield "graphs", testing.graphs()
    yield "large graphs", testing.graphs(most=14)
    yield "nested", testing.graphs(most=3, kinds=("repeat", "kernel", "pointwise", "einsum"))
    for kind in sorted(KINDS):
        yield kind, testing.ops(kind)


def drawn(strategy, number, examples, counts, name):
    """Hold some graphs to the laws; return the error of the smallest graph that breaks any."""

    def holds(case):
        counts[name] += 1
        counts["ops"] += sum(1 for _ in case.graph.walk())
        testing.check(case.graph, **case.point)

    try:
        testing.search(strategy, holds, examples, seed=number)
    except Exception as error:  # any exception from a law or the library is a finding
        return error
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=30, help="graphs of one kind in a row")
    given_ = parser.parse_args()
    numbers, counts, findings = random.Random(given_.seed), Counter(), 0
    end = time.monotonic() + 60 * given_.minutes
    while time.monotonic() < end:
        for name, strategy in strategies():
            number = numbers.getrandbits(32)
            error = drawn(strategy, number, given_.examples, counts, name)
            if error is not None:
                findings += 1
                print(f"FOUND in {name}, seed {number}: {type(error).__name__}: {error}\n", flush=True)
            if time.monotonic() > end:
                break
    graphs = sum(n for name, n in counts.items() if name != "ops")
    print(f"{graphs} graphs of {counts['ops']} ops held to {len(testing.LAWS)} laws, {findings} findings")


if __name__ == "__main__":
    main()
