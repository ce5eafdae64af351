"""`ragkv calibrate`: measure a model, once. The data folder keeps the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import (
    Collection,
    Data,
    Device,
    Model,
    Store,
    check_documents,
    check_model,
    opened,
    out,
    progress,
    settings_from,
    tell,
)
from ragkv.cli.questions_file import FileQuestion, read_questions

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.engine.calibration import CalibrationSet
    from ragkv.evaluation.confidence import Reliability
    from ragkv.model.decoder import DecoderModel
    from ragkv.types import Document

REACHES = (4, 8, 16)
"""Values of scout's `reach` that --documents compares."""
CAPS = (0.05, 0.1, 0.15, 0.2, 0.3)
"""Values of scout's `cap` that --documents compares."""


def calibrate(
    confidence: Annotated[
        Path | None,
        typer.Option(
            metavar="QUESTIONS", help='Measure the confidence instead: JSON lines {"q": "…", "a": ["gold", …]}.'
        ),
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Ask about these files and folders instead of generated documents."),
    ] = None,
    collection: Collection = "default",
    unanswerable: Annotated[
        str | None,
        typer.Option(metavar="COLLECTION", help="Ask this collection, too: it has none of the answers."),
    ] = None,
    within: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Points of F1 that the default method may lose; with --documents.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, max=64, help="Chunks to retrieve for --confidence.")] = None,
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Find the model's retrieval heads and stable layers, once per model. The data folder keeps the profile.

    With --documents the questions are made of your own documents, and the profile learns how far a score reaches and
    what share of the context is kept at most, too. Do it before `ragkv ingest`: stored KV belongs to the profile. The
    same questions are then asked under full prefill and under methods that read stored KV, and the quickest one that
    is --within of it becomes the model's default.

    With --confidence the questions are asked about the documents of the collection, and the profile learns from right
    and wrong answers how sure the model may be. Use questions that nothing else is measured with. With --unanswerable
    each is asked a second time where `unknown` is right.
    """
    settings = settings_from(data, store, model, device)
    check_model(settings)
    if confidence is not None:
        asked = [(collection, each) for each in read_questions(confidence) if each.gold]
        if unanswerable is not None:
            from ragkv.passages import UNKNOWN

            asked += [(unanswerable, replace(each, gold=(UNKNOWN,))) for _, each in asked]
        return _calibrate_confidence(settings, asked, top_k)
    return _calibrate_heads(settings, documents, within)


def _calibrate_heads(settings: Settings, documents: Sequence[Path] | None, within: float) -> int:
    """Find heads with generated questions, or with questions about documents, and save the profile."""
    read = _read(settings, documents) if documents else []
    from ragkv.engine.calibration import calibrate as measure
    from ragkv.engine.calibration import needle_sets
    from ragkv.engine.head_choice import CalibrationParams
    from ragkv.engine.open_model import load_model
    from ragkv.evaluation.agreement import measure_agreement, question_sets, with_agreement
    from ragkv.evaluation.evidence import set_evidence
    from ragkv.retrieval import make_embedder

    loaded = load_model(settings, tell)
    if documents:
        params = CalibrationParams(reaches=REACHES, caps=CAPS)
        sets = _document_sets(settings, loaded, read)
    else:
        params, sets = CalibrationParams(), needle_sets(loaded)
    with progress() as report:
        embedder = make_embedder(settings.embedder, str(loaded.device))
        found = measure(loaded, sets, report, params, partial(set_evidence, embedder=embedder))
        profile = found.profile
        loaded.profile = profile
        measured = (
            measure_agreement(loaded, question_sets(sets), set_evidence(loaded, embedder), within, report)
            if documents
            else []
        )
    if measured:
        profile = with_agreement(profile, measured)
    path = settings.data / "profiles" / f"{loaded.weights_hash}.json"
    profile.save(path)
    console = out()
    heads = ", ".join(f"layer {layer} head {head}" for layer, head in found.profile.retrieval_heads)
    console.print(f"questions        {found.questions}")
    console.print(f"retrieval heads  {heads or 'none found'}")
    if documents:
        console.print(f"reach            {found.profile.scout_reach} tokens")
        console.print(f"cap              {found.profile.scout_cap:.0%} of the blocks")
    console.print(f"stable layers    {', '.join(map(str, found.profile.stable_layers))}")
    for budget, recall in zip(params.budgets, found.recall, strict=True):
        console.print(f"recall           {recall:.2f} of the answers with {budget:.0%} of the blocks")
    for one in measured:
        told = f"{one.delta:+.1f} points of F1 to full ({one.low:+.1f} … {one.high:+.1f}), {one.questions} questions"
        console.print(f"{one.method:<16} {told}")
    if measured:
        console.print(f"default method   {profile.method}")
    console.print(f"saved            {path}")
    return 0


def _read(settings: Settings, paths: Sequence[Path]) -> list[Document]:
    """Return the documents of files and folders."""
    from ragkv.cli.tune import read_documents
    from ragkv.errors import InputError

    documents = read_documents(list(paths), settings)
    if not documents:
        raise InputError("there is no text in these documents; name files or folders that `ragkv ingest` reads")
    return documents


def _document_sets(settings: Settings, model: DecoderModel, documents: list[Document]) -> list[CalibrationSet]:
    """Return questions about documents, which are split as ingest splits them."""
    from ragkv.cli.tune import split_all
    from ragkv.tune.contexts import ProseSource
    from ragkv.tune.document_sets import document_sets

    passages = split_all(documents, model.prompt, settings.chunk_tokens or model.profile.chunk_tokens)
    return document_sets(ProseSource(passages, lambda chunk: len(model.prompt.chunk(*chunk))))


def _calibrate_confidence(settings: Settings, asked: Sequence[tuple[str, FileQuestion]], top_k: int | None) -> int:
    """Ask (collection, question) pairs, fit the coefficients and save them into the profile of the data folder."""
    from ragkv.errors import InputError
    from ragkv.evaluation.confidence import JudgedAnswer, check_enough, fit, out_of_fold, reliability
    from ragkv.evaluation.score import exact_match
    from ragkv.types import AskOptions

    if not asked:
        raise InputError('no question has gold answers; a line is {"q": "question", "a": ["gold answer", …]}')
    check_enough(len(asked))
    for name in {name for name, _ in asked}:
        check_documents(settings, name)
    judged: list[JudgedAnswer] = []
    with opened(settings) as engine:
        with progress() as report:
            for number, (collection, question) in enumerate(asked, 1):
                answer = engine.answer(question.question, AskOptions(collection, top_k=top_k))
                if answer.report.evidence is not None:  # a rule's answer has none
                    judged.append(JudgedAnswer(answer.report.evidence, bool(exact_match(answer.answer, question.gold))))
                report("asking", number, len(asked))
        coefficients = fit(judged)
        path = settings.data / "profiles" / f"{engine.model.weights_hash}.json"
        replace(engine.model.profile, confidence=coefficients).save(path)
    _print(coefficients, reliability(out_of_fold(judged), [each.right for each in judged]))
    out().print(f"saved              {path}")
    return 0


def _print(coefficients: tuple[float, ...], found: Reliability) -> None:
    console = out()
    console.print(f"questions          {found.questions}, {found.accuracy:.0%} answered right")
    console.print(f"coefficients       {', '.join(f'{each:.4f}' for each in coefficients)}")
    console.print(f"calibration error  {found.calibration_error:.3f}, out of fold")
    console.print(f"Brier score        {found.brier:.3f}")
    console.print(f"AUROC              {found.auroc:.3f}")
    for point in found.coverages:
        console.print(
            f"precision {point.precision:.0%}      {point.coverage:.0%} of the questions answered, with abstain_below "
            f"{point.threshold:.2f}"
            if point.coverage
            else f"precision {point.precision:.0%}      not reached"
        )
