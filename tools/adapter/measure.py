"""Measure a model on question sets, with several processes beside each other, and print the figures by kind.

    python -m tools.adapter.measure ask MODEL --adapter FOLDER --share 0/14 --out 0.jsonl natural:8 natural:24 FILE…
    python -m tools.adapter.measure table 0.jsonl 1.jsonl …
    python -m tools.adapter.measure plot 0.jsonl 1.jsonl … --out frontier.svg
    python -m tools.adapter.measure documents dev.jsonl       the development documents, for `ragkv ingest`

A process asks every 14th context. FILE is in LongBench's format. What the model cannot read whole is left
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.natural import natural_sets, pages
from benchmarks.plot import check_plot
from ragkv.errors import InputError
from ragkv.evaluation.evidence import packaged_evidence
from ragkv.evaluation.quality import NO_CONTEXT, QualityParams, ask_all, check_fits
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.score import interval
from ragkv.evaluation.sets import QuestionSet
from ragkv.model.decoder import DecoderModel
from ragkv.model.source import ModelSource

DEVELOPMENT = Path(__file__).parent.parent / "demo_model" / "dev"
METHODS = ("full", "reuse", "scout:repair=none", "scout:repair=kept")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ask = commands.add_parser("ask")
    ask.add_argument("model")
    ask.add_argument("sets", nargs="+")
    ask.add_argument("--adapter", default="")
    ask.add_argument("--methods", nargs="+", default=list(METHODS))
    ask.add_argument("--share", default="0/1")
    ask.add_argument("--questions", type=int, default=0, help="most questions of a set; 0: all")
    ask.add_argument("--out", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("files", nargs="+", type=Path)
    frontier = commands.add_parser("plot")
    frontier.add_argument("files", nargs="+", type=Path)
    frontier.add_argument("--out", type=Path, required=True)
    documents = commands.add_parser("documents")
    documents.add_argument("out", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "documents":
        write_documents(chosen.out)
    elif chosen.command == "ask":
        ask_share(chosen)
    else:
        rows = [json.loads(line) for file in chosen.files for line in file.read_text(encoding="utf-8").splitlines()]
        if chosen.command == "plot":
            plot_kept(rows, chosen.out)
        else:
            print("\n".join(figures(rows)))


def write_documents(out: Path) -> None:
    """Write the development documents as JSON lines that `ragkv ingest` reads."""
    lines = [
        json.dumps({"id": page.id, "title": page.title, "text": "\n\n".join(page.pieces)}, ensure_ascii=False)
        for page in pages(DEVELOPMENT)
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ask_share(chosen: argparse.Namespace) -> None:
    """Ask this process's part of all sets, and write an object a line."""
    model = DecoderModel.load(ModelSource(chosen.model, chosen.adapter))
    number, count = map(int, chosen.share.split("/"))
    params = QualityParams(evidence=packaged_evidence(model))
    with chosen.out.open("w", encoding="utf-8") as file:
        for name in chosen.sets:
            sets = [each for each in question_sets(name, model) if _fits(model, each)]
            if chosen.questions:
                sets = sets[: chosen.questions]
            for at in range(number, len(sets), count):
                for outcome in ask_all(model, [sets[at]], chosen.methods, lambda *progress: None, params):
                    file.write(json.dumps(_row(Path(name).stem, at, outcome)) + "\n")
                file.flush()


def _fits(model: DecoderModel, asked: QuestionSet) -> bool:
    """Return whether the model can read a set whole."""
    try:
        check_fits(model, asked, QualityParams().max_tokens)
    except InputError:
        return False
    return True


def _row(name: str, at: int, outcome: QualityOutcome) -> dict[str, Any]:
    figures, question = outcome.figures, outcome.question
    return {
        "set": name,
        "at": (at, outcome.at[1]),
        "method": outcome.method,
        "kind": question.kind,
        "q": question.text,
        "a": list(question.gold),
        "answer": outcome.answer,
        "em": figures.em,
        "f1": figures.f1,
        "recall": figures.recall,
        "sequence": figures.sequence,
        "recompute": figures.recompute,
    }


def question_sets(name: str, model: DecoderModel) -> list[QuestionSet]:
    """Return the sets of a name: natural:CHUNKS, dev:CHUNKS, or a file in LongBench's format."""
    kind, _, chunks = name.partition(":")
    if kind == "natural":
        return natural_sets(int(chunks))
    if kind == "dev":
        return natural_sets(int(chunks), folder=DEVELOPMENT)
    from benchmarks.longbench import longbench_sets
    from ragkv.ingest.chunker import split
    from ragkv.types import Document

    def pieces(document: Document) -> list[tuple[str, str]]:
        found = split(document, model.prompt, model.profile.chunk_tokens)
        return [(chunk.title, chunk.text) for chunk in found]

    return longbench_sets(Path(name), pieces)


def figures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per set and method: means, the paired difference to full, and exact match by kind."""
    full = {(row["set"], *row["at"]): row for row in rows if row["method"] == "full"}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["set"], row["method"]].append(row)
    for (name, method), mine in sorted(groups.items()):
        means = {key: statistics.fmean(row[key] for row in mine) for key in ("em", "f1", "sequence", "recompute")}
        deltas = [row["f1"] - full[row["set"], *row["at"]]["f1"] for row in mine if (name, *row["at"]) in full]
        low, high = interval(deltas) if deltas else (0.0, 0.0)
        kinds: dict[str, list[float]] = defaultdict(list)
        for row in mine:
            unknown = [answer.lower() for answer in row["a"]] == ["unknown"]
            kinds[row["kind"] or ("none" if unknown else "some")].append(row["em"])
        answerable = [row for row in mine if [answer.lower() for answer in row["a"]] != ["unknown"]]
        wrong = statistics.fmean(row["answer"].lower().startswith("unknown") for row in answerable)
        yield (
            f"{name:22} {method:18} n {len(mine):4} EM {means['em']:.3f} F1 {means['f1']:.3f} "
            f"d {statistics.fmean(deltas or [0]):+.3f} [{low:+.3f} {high:+.3f}] seq {means['sequence']:.2f} "
            f"rec {means['recompute']:.2f} false-unknown {wrong:.3f} "
            + " ".join(f"{kind} {statistics.fmean(each):.3f}" for kind, each in sorted(kinds.items()))
        )


def plot_kept(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw, for every set that was asked without context, F1 over the share of the context that a method keeps."""
    check_plot(out)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["set"] for row in rows if row["method"] == NO_CONTEXT))
    # The salt makes the same file of the same figures.
    with rc_context({"svg.hashsalt": "ragkv", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(3 * len(names), 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            axes.set(title=name, xlabel="share of the context kept, %", ylabel="F1, %", xlim=(-5, 110))
            for method in dict.fromkeys(row["method"] for row in rows if row["set"] == name):
                mine = [row for row in rows if (row["set"], row["method"]) == (name, method)]
                at = tuple(100 * statistics.fmean(row[key] for row in mine) for key in ("sequence", "f1"))
                axes.scatter(*at, s=28, label=method.partition(":")[0] + (" (literal)" if ":" in method else ""))
            axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else {})


if __name__ == "__main__":
    main()
