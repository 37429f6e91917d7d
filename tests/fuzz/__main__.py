"""Fuzz programs, chains of transforms and ranks, and count wrong results: `python -m tests.fuzz --minutes 10`."""

import argparse
import importlib
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter

import costgraph as cg

WHAT = ("programs", "chains", "ranks")
#: Kinds of refusals that are printed.
MOST_KINDS = 12


def checks(names):
    """Return each fuzzer module's `check(rng)`."""
    modules = {}
    for name in names:
        try:
            modules[name] = importlib.import_module(f"{__package__}.{name}").check
        except ModuleNotFoundError as error:
            if error.name != f"{__package__}.{name}":
                raise
    return modules


def one(check, seed):
    """Run a check with one seed; an unexpected exception counts as a wrong result."""
    try:
        return check(random.Random(seed)) or (1, [], [])  # checks that assert return nothing
    except cg.CostGraphError as error:
        return 1, [str(error)], []
    except Exception:
        return 1, [], [traceback.format_exc(limit=-3)]


def kind_of(message):
    """Return an error message without names, numbers and program lines, so that similar refusals count as one."""
    text = message.splitlines()[0].partition("; ")[0]
    return re.sub(r"'[^']*'|/\S+|\d+", "_", text)[:160]


def main(arguments=None):
    """Return 1 if the share of wrong results exceeds the limit per thousand."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to draw")
    parser.add_argument("--count", type=int, help="programs of each kind, in place of a time")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the next one adds 1")
    parser.add_argument("--what", choices=WHAT, action="append", help="by default everything that there is")
    parser.add_argument("--limit", type=float, default=2.0, help="wrong draws of a thousand that are allowed")
    parser.add_argument("--quiet", action="store_true", help="print counts alone")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    selected = checks(given.what or WHAT)
    draws, seed, end = dict.fromkeys(selected, 0), given.seed, time.monotonic() + 60 * given.minutes
    answers, failed = dict(draws), dict(draws)
    refusals = {name: Counter() for name in selected}
    while selected and (seed - given.seed < given.count if given.count else time.monotonic() < end):
        for name, check in selected.items():
            tried, refused, wrong = one(check, seed)
            draws[name] += tried > 0
            answers[name] += tried
            refusals[name].update(map(kind_of, refused))
            failed[name] += bool(wrong)
            if wrong and not given.quiet:
                again = f"python -m {__package__} --what {name} --seed {seed} --count 1"
                print(f"-- {again}", *wrong, sep="\n", flush=True)
        seed += 1
    worst = 0.0
    for name, count in draws.items():
        rate = 1000 * failed[name] / max(count, 1)
        worst = max(worst, rate)
        print(
            f"{name}: {count} drawn, {answers[name]} questions, {refusals[name].total()} refused, "
            f"{failed[name]} wrong ({rate:.1f} per thousand)"
        )
        for text, number in refusals[name].most_common(MOST_KINDS):
            print(f"  refused {number / max(answers[name], 1):.1%}: {text}")
    return int(worst > given.limit)


if __name__ == "__main__":
    sys.exit(main())
