"""`ragkv tune`, from texts to an adapter: measure, train, calibrate, measure again.

out/adapter_config.json, adapter_model.safetensors     a LoRA adapter, in PEFT's format
out/wrapper.safetensors                                or wrapper tokens
out/profile.json                                       prompt pieces, retrieval heads, whether scout repairs
out/report.json, report.md                             answers before and after
out/checkpoints/                                       where a stopped run goes on
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragkv.engine.calibration import NeedleSetParams, calibrate, needle_sets
from ragkv.engine.registry import FULL
from ragkv.errors import ModelUnsupported
from ragkv.evaluation.evidence import packaged_evidence
from ragkv.evaluation.quality import ask_all
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.adapter import WEIGHTS
from ragkv.model.checkpoint import LoadedCheckpoint, load_checkpoint
from ragkv.model.decoder import DecoderModel
from ragkv.model.locations import WRAPPER
from ragkv.model.profile import Profile, load_profile
from ragkv.model.prompt import Prompt
from ragkv.model.source import ModelSource
from ragkv.model.supported import architecture_of, has_states
from ragkv.model.wrapper import EVERY_COLLECTION, Wrappers, read_wrapper
from ragkv.tune.adapters import new_wrapper
from ragkv.tune.contexts import Chunk, Mixture, ProseSource, Source, TextPassage, check_enough
from ragkv.tune.given import GivenQuestion, given_source
from ragkv.tune.needles import NeedleSource
from ragkv.tune.options import TuneOptions
from ragkv.tune.report import Measured, Progress, as_json, held_out_sets, loss, markdown, measure, needs_repair
from ragkv.tune.rows import RowMaker
from ragkv.tune.training import RowBatches, Say, TunedAdapter, is_first_process, train, with_adapter

HELD_OUT = 10
"""Every tenth document is kept for the report."""


@dataclass(frozen=True)
class TuneRun:
    """A run.

    Attributes:
        source: The model. A LoRA run goes on from its LoRA adapter. A wrapper run takes that as a part of the model,
            and goes on from its wrapper for every collection.
        out: Where the adapter goes.
        options: The training.
        device: As in `load_checkpoint`.
        cache: Folder of converted GGUF files; None for the default one.
        needles: Share of the contexts with generated documents (engine/needles.py).
        given: Share of the contexts with given questions, where there are any.
        report_contexts: Held-out contexts that the report asks about; 0 makes no report.
        report_tokens: Tokens of each, about.
        calibration: Questions with which retrieval heads are found.
    """

    source: ModelSource
    out: Path
    options: TuneOptions = field(default_factory=TuneOptions)
    device: str = "auto"
    cache: Path | None = None
    needles: float = 0.15
    given: float = 0.5
    report_contexts: int = 12
    report_tokens: int = 2048
    calibration: NeedleSetParams = field(default_factory=NeedleSetParams)


@dataclass(frozen=True)
class TuneOutcome:
    """What a run made.

    Attributes:
        adapter: What was trained.
        report: A table in Markdown; "" where nothing was measured.
        refused: Why it was not saved; "" where it was.
    """

    adapter: TunedAdapter
    report: str
    refused: str = ""


def tune(
    run: TuneRun, passages: Sequence[TextPassage], given: Sequence[GivenQuestion], say: Say, progress: Progress
) -> TuneOutcome:
    """Make an adapter. Of several processes that torchrun started, the first one measures and calibrates.

    Args:
        run: The run.
        passages: The texts, in passages of a chunk's size.
        given: Questions about them; empty makes questions by rules alone.
        say: Is told what happens.
        progress: Is told how far the measurements are.

    Raises:
        InputError: There is too little text.
        ModelNotFound: The model or its adapter cannot be loaded.
        ModelUnsupported: The model is not supported.
    """
    training, held_out = split_documents(passages)
    before, sets = None, list[QuestionSet]()
    if run.report_contexts and is_first_process():
        say("measuring before")
        model = _calibrated(run, run.source, progress)
        sets = _held_out_sets(run, model, held_out)
        if sets:
            before = measure(model, sets, "before", progress)
        else:
            say("no report: the rules find no questions in the held-out documents")
        del model  # its weights leave the GPU before the training
    adapter = _train(run, training, given, say, progress)
    if not is_first_process():
        return TuneOutcome(adapter, "")
    tuned = _calibrated(run, _with_result(run), progress)
    report = refused = ""
    if before is not None:
        say("measuring after")
        after = measure(tuned, sets, "after", progress, before)
        tuned.profile = replace(tuned.profile, scout_repair="kept" if needs_repair(after) else "none")
        report, refused = _write_report(run, adapter, before, after), loss(before, after)
    if refused:
        (run.out / (WEIGHTS if run.options.kind == "lora" else WRAPPER)).unlink()
    else:
        tuned.profile.save(run.out / "profile.json")
    return TuneOutcome(adapter, report, refused)


def split_documents(passages: Sequence[TextPassage]) -> tuple[list[TextPassage], list[TextPassage]]:
    """Return (passages to train with, held-out passages): whole documents, every tenth held out.

    Raises:
        InputError: There are fewer than two documents.
    """
    names = list(dict.fromkeys((each.family, each.document) for each in passages))
    check_enough(len(names))
    held = set(names[HELD_OUT - 1 :: HELD_OUT] or names[-1:])
    training = [each for each in passages if (each.family, each.document) not in held]
    return training, [each for each in passages if (each.family, each.document) in held]


def _train(
    run: TuneRun, passages: Sequence[TextPassage], given: Sequence[GivenQuestion], say: Say, progress: Progress
) -> TunedAdapter:
    """Train and save the adapter."""
    taught, start = _split_source(run)
    loaded = load_checkpoint(taught, run.device, "auto", None, run.cache)
    check_trainable(loaded.weights.config)
    profile, wrapper = _profile(run, loaded), None
    if run.options.kind == "wrapper":
        wrapper = read_wrapper(start) if start else new_wrapper(loaded.weights, run.options, loaded.weights_hash)
        wrapper = replace(wrapper, base=loaded.weights_hash)
    prompt = Prompt(loaded.tokenizer, profile, Wrappers({EVERY_COLLECTION: wrapper} if wrapper else {}))
    maker = RowMaker(loaded.tokenizer, prompt, profile.block, loaded.tokenizer.eos_token_id, run.options.drop)
    source = _sources(run, passages, given, maker, DecoderModel(loaded.weights, loaded.tokenizer, profile), progress)
    batches = RowBatches(source, maker, run.options, run.options.steps * run.options.accumulate)
    say("training")
    model = with_adapter(loaded.weights, run.options, start, wrapper)
    found = train(model, batches, run.options, run.out, say, loaded.weights_hash)
    _name_base(run.out / "adapter_config.json", run.source)
    return found


def _split_source(run: TuneRun) -> tuple[ModelSource, Path | None]:
    """Return the model whose weights are frozen, and the folder of what is gone on from."""
    if run.options.kind == "lora":
        return replace(run.source, adapter="", wrappers=()), Path(run.source.adapter) if run.source.adapter else None
    own = dict(run.source.wrappers).get(EVERY_COLLECTION)
    return replace(run.source, wrappers=()), Path(own) if own else None


def _with_result(run: TuneRun) -> ModelSource:
    """Return the model with what the run has made."""
    if run.options.kind == "lora":
        return replace(run.source, adapter=str(run.out), wrappers=())
    return replace(run.source, wrappers=((EVERY_COLLECTION, str(run.out)),))


def _sources(
    run: TuneRun,
    passages: Sequence[TextPassage],
    given: Sequence[GivenQuestion],
    maker: RowMaker,
    model: DecoderModel,
    progress: Progress,
) -> Source:
    """Return the user's texts, the generated ones, and the given questions, mixed."""
    count = maker.chunk_tokens
    mixed: list[tuple[Source, float]] = [(ProseSource(passages, count), 1.0 - run.needles)]
    if run.needles:
        mixed.append((NeedleSource(lambda text: len(model.prompt.plain(text))), run.needles))
    if given:
        asked = given_source(given, passages, count).answered(lambda c, q: answer_fully(model, c, q), progress)
        mixed = [(source, weight * (1 - run.given)) for source, weight in mixed] + [(asked, run.given)]
    return Mixture(mixed)


def answer_fully(model: DecoderModel, chunks: Sequence[Chunk], question: str) -> str:
    """Return what the model answers under full attention."""
    asked = QuestionSet(tuple(chunks), (SetQuestion(question, (), ""),), "given question")
    return ask_all(model, [asked], [FULL], lambda *far: None)[0].answer


def check_trainable(config: Any) -> None:
    """Raise ModelUnsupported for a model with layers whose state would run from chunk to chunk of a row."""
    if has_states(config):
        raise ModelUnsupported(f"{architecture_of(config)} cannot be tuned: some of its layers have a state")


def _profile(run: TuneRun, loaded: LoadedCheckpoint) -> Profile:
    """Return the profile that the rows are made with: that of the adapter that is gone on from, else the model's."""
    adapter = Path(run.source.adapter) / "profile.json"
    found = loaded.profile
    if run.source.adapter and adapter.is_file():
        found = load_profile(adapter, found)
    return found


def _calibrated(run: TuneRun, source: ModelSource, progress: Progress) -> DecoderModel:
    """Return the model with its retrieval heads, which are looked for where they are not known."""
    model = DecoderModel.load(source, run.device, "auto", None, run.cache)
    check_trainable(model.config)
    known = model.profile.retrieval_heads and source == run.source
    if known or not model.compares_heads:
        return model
    sets = needle_sets(model, run.calibration)
    model.profile = calibrate(model, sets, progress, evidence=packaged_evidence).profile
    return model


def _held_out_sets(run: TuneRun, model: DecoderModel, held_out: Sequence[TextPassage]) -> list[QuestionSet]:
    """Return questions about the held-out documents; none where the rules find none in them."""
    source = ProseSource(held_out, lambda chunk: len(model.prompt.chunk(*chunk)))
    return held_out_sets(source, run.report_contexts, run.report_tokens, run.options.seed)


def _write_report(run: TuneRun, adapter: TunedAdapter, before: Measured, after: Measured) -> str:
    """Write report.json and report.md. Returns the table."""
    options = {**asdict(run.options), "drop": asdict(run.options.drop)}
    table = markdown(before, after)
    figures = {
        "model": run.source.shown,
        "options": options,
        "steps": adapter.steps,
        "tokens": adapter.tokens,
        "seconds": round(adapter.seconds, 1),
        "losses": adapter.losses,
        "answers": as_json(before, after),
    }
    (run.out / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (run.out / "report.md").write_text(table, encoding="utf-8")
    return table


def _name_base(config: Path, source: ModelSource) -> None:
    """Write the model's name into the adapter's configuration, in place of the folder it was loaded from."""
    if config.is_file():  # another process writes it where several train
        facts = json.loads(config.read_text(encoding="utf-8"))
        facts["base_model_name_or_path"] = source.name or Path(source.model).name
        config.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
