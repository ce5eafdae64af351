"""Run mutants: `python -m tests.mutants [NAME ...] [--jobs N]`. A NAME may be a part of a name.

First the named tests run on the tree as it is; they must pass. Then each mutant is applied to a copy of the tree, and
its tests must fail. The exit status is 1 if a mutant survives, its patch no longer applies or its tests cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.mutant import Mutant, Outcome, all_mutants, copied_tree, run_mutant, run_tests


def choose_mutants(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose name contains one of `names`, or all if there are no names."""
    mutants = all_mutants()
    return [each for each in mutants if not names or any(name in each.name for name in names)]


def check_tests(mutants: Sequence[Mutant]) -> str:
    """Run the tests of all mutants on the tree as it is; return the first that fails, or an empty text."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copied_tree() as tree:
        status, failed = run_tests(tree, tests)
    return failed if status else ""


def row(outcome: Outcome, width: int) -> str:
    """Return a line of the table."""
    return f"{outcome.mutant.name:<{width}}  {outcome.verdict:<17}  {outcome.by}"


def main(given: Sequence[str] | None = None) -> int:
    """Run the mutants and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run, by a part of their name; default all")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at a time (default 2)")
    options = parser.parse_args(given)
    mutants = choose_mutants(options.names)
    if not mutants:
        print("no mutant has such a name", file=sys.stderr)
        return 1
    failed = check_tests(mutants)
    if failed:
        print(f"the tests must pass without a mutant, but this one fails: {failed}", file=sys.stderr)
        return 1
    width = max(len(mutant.name) for mutant in mutants)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(run_mutant, mutants):
            print(row(outcome, width), flush=True)
            outcomes.append(outcome)
    count = Counter(outcome.verdict for outcome in outcomes)
    print(f"{count['killed']} of {len(outcomes)} mutants killed, {count['skipped']} skipped")
    return 0 if count["killed"] + count["skipped"] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
