"""`python -m tools.demo_model`: from nothing to the bundled model's weights.

Makes a tokenizer, trains in stages, exports. Run it again to resume; --seconds stops it in time with a checkpoint.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tools.demo_model import near, tokenizer
from tools.demo_model.recipe import BUNDLED
from tools.demo_model.team import Team
from tools.demo_model.train import TrainingRun


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"), help="checkpoint, tokenizer and log")
    parser.add_argument("--out", type=Path, help="where the weights go (default: WORK/model)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; run again to go on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that generate text")
    parser.add_argument("--shard", default="1GB", help="largest weight file")
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.seconds
    chosen.work.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        print(line, flush=True)
        with (chosen.work / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    team = Team.join(chosen.device)
    if team.rank == 0 and not (chosen.work / "tokenizer").exists():
        tokenizer.train(chosen.work / "tokenizer", BUNDLED.vocabulary, BUNDLED.seed, BUNDLED.tokenizer_contexts)
        say(f"tokenizer trained: {BUNDLED.vocabulary} entries")
        say(f"recipe: {asdict(BUNDLED)}")
    if team.rank == 0 and not (chosen.work / near.NAME).exists():
        say(f"near words found for {near.make(chosen.work, near.words())} words")
    team.wait()
    run = TrainingRun(BUNDLED, chosen.work, team, chosen.workers, say)
    done = run.train(until)
    if team.rank == 0:
        run.export(chosen.out or chosen.work / "model", chosen.shard)
        say("done" if done else "stopped in time; run again to go on")
    team.leave()


if __name__ == "__main__":
    main()
