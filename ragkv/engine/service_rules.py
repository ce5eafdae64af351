"""What is asked of the service and not of its documents is answered by a rule: no document is read, no model asked.

    greeting    "hello", "thanks"
    service     "what can I ask you?", "who are you?"
    summary     "summarise …": only where the model quotes spans (`extractive` in its profile); others are asked
    list        "list the documents": likewise

Every pattern covers the whole question, so "List the pumps of Tarn" is a question about the documents. English, with
greetings of some other languages.
"""

from __future__ import annotations

import re

from ragkv.catalog import Catalog
from ragkv.model.decoder import DecoderModel
from ragkv.passages import PUNCTUATION, shortened
from ragkv.report import (
    Answer,
    ByteCounts,
    CacheReport,
    DecodeReport,
    PrefillReport,
    Ratios,
    Report,
    TierHits,
    Timings,
    TokenCounts,
)
from ragkv.timing import StepTimer
from ragkv.types import AskOptions

_PAUSE = re.compile(r"[^\w\s'’-]")
"""What says nothing between words: punctuation and emoji."""
LONGEST = 200
"""Characters of the longest question that a rule is tried on, but for `summary`, which any length may follow."""
SOME, MANY = 3, 20
"""Titles that an answer names; those of `list`."""
COUNTED = 1000
"""Documents that are counted where a filter chooses them."""
TITLE = 80
"""Characters of a title."""

_HELLO = (
    r"(?:hello|hi|hey|hiya|howdy|greetings|good (?:morning|afternoon|evening|day)|how are you"
    r"|(?:(?:ok|many) )?thanks|thank you|bye|goodbye|hallo|guten tag|moin|salut|bonjour|hola|ciao|你好|您好)"
)
_THERE = r"(?: (?:there|all|everyone|world|bot|again|ragkv|a lot|very much|so much|today))?"
_GREETING = re.compile(rf"{_HELLO}{_THERE}(?: {_HELLO}{_THERE})?")
_SERVICE = re.compile(
    r"help(?: me)?|(?:who|what) are you|what is (?:ragkv|your name|this service(?: for)?)|what does this service do"
    r"|are you (?:an? )?(?:ai|bot|robot|machine|human|person|real)"
    r"|(?:what|which) topics do you (?:know(?: about)?|cover)"
    r"|(?:tell|show) me what you can do|what are you able to (?:do|answer)|what can i do here|how (?:do|can) i use this"
    r"|(?:what|which)(?: kinds? of)? questions can you answer"
    r"|(?:what|(?:what|which)(?: kinds? of)? (?:questions|topics))"
    r" (?:can|may|could|should) (?:i|we|one) ask(?: (?:you|here))?(?: about| here)?"
    r"|what (?:can|could) you (?:do|answer|tell me|help(?: me)? with)(?: for me)?|what do you (?:do|know(?: about)?)"
    r"|how (?:can|could|do|does) (?:you help(?: me)?|you work|i use (?:you|this service)|this service work)"
)
_OWN = r"(?:documents?|files?|sources|titles|document titles|titles of (?:the|your|all) documents)"
_HAVE = (
    r"(?: (?:that )?(?:you have|you know|there are|are (?:there|here|available|stored)|do you have|do you know"
    r"|in (?:the|this|your) collection|here))*"
)
_LIST = re.compile(
    r"(?:(?:can|could|would) you )?(?:list|show|name|give)(?: me)?(?: all)?(?: of)?(?: the| your| my| our)?"
    rf"(?: available)? {_OWN}{_HAVE}|(?:which|what) {_OWN}{_HAVE}|how many {_OWN}{_HAVE}"
    rf"|list(?: everything)?|what is in (?:this|the|your) collection"
    rf"|(?:which|what) {_OWN} can (?:i ask(?: you)? about|you (?:search|read|see|use))"
)
_SUMMARY = re.compile(
    r"(?:please )?(?:(?:can|could|would|will) you )?(?:please )?"
    r"(?:summari[sz]e\b|sum up\b|tl;? ?dr\b"
    r"|(?:(?:give|write|make|provide|create)(?: me| us)? |i (?:need|want|would like) |can i (?:have|get) )an? "
    r"(?:short |brief |quick )?(?:summary|overview)\b|(?:summary|overview)(?:,? please)?\Z)"
)


def answer_by_rule(question: str, options: AskOptions, model: DecoderModel, catalog: Catalog) -> Answer | None:
    """Answer a question about the service itself; None for any other, and for one that asks for JSON."""
    extractive = model.profile.extractive
    rule = rule_of(question, extractive)
    if not rule or options.answer_schema is not None:
        return None
    timer = StepTimer()
    text = _answer_of(rule, extractive, catalog, options)
    return Answer(question, text, (), rule_report(rule, model.name, timer))


def rule_of(question: str, extractive: bool) -> str:
    """Return the rule that answers a question: greeting, service, summary or list; "" where none does.

    Args:
        question: The question.
        extractive: Whether the model quotes spans, so that it can neither summarise nor list.
    """
    text = " ".join(question.casefold().replace("what's", "what is").split()).strip(PUNCTUATION)
    if extractive and _SUMMARY.match(text):
        return "summary"
    if len(text) > LONGEST:
        return ""
    text = " ".join(_PAUSE.sub(" ", text.removeprefix("please ").removesuffix(" please")).split())
    if _GREETING.fullmatch(text):
        return "greeting"
    if _SERVICE.fullmatch(text):
        return "service"
    return "list" if extractive and _LIST.fullmatch(text) else ""


def _answer_of(rule: str, extractive: bool, catalog: Catalog, options: AskOptions) -> str:
    """Return the answer of a rule: what the service does, and which documents the collection has.

    Args:
        rule: As `rule_of` returns it.
        extractive: Whether the model quotes spans.
        catalog: Knows the documents.
        options: Name the collection, and a filter.
    """
    does = "I answer questions from the documents of this collection and cite the passages that I read."
    cannot = "I give short answers that stand in a document, and do not summarise." if extractive else ""
    begins = {"greeting": f"Hello. {does}", "service": " ".join(filter(None, (does, cannot)))}
    first = begins.get(rule, cannot if rule == "summary" else "")
    asks = "" if rule == "list" else "Ask, for example, who, when, where or how many."
    return " ".join(filter(None, (first, _documents(catalog, options, MANY if rule == "list" else SOME), asks)))


def _documents(catalog: Catalog, options: AskOptions, most: int) -> str:
    """Say how many documents there are, and the titles of some."""
    if options.filter:
        shown = catalog.page(options.collection, None, COUNTED, options.filter)
        count = len(shown)
    else:
        sizes = [each.documents for each in catalog.collections(options.collection) if each.name == options.collection]
        shown, count = catalog.page(options.collection, None, most), sum(sizes)
    if not shown:
        return "There are no documents yet." if not options.filter else "No document matches the filter."
    titles = ", ".join(f"“{shortened(' '.join((each.title or each.id).split()), TITLE)}”" for each in shown[:most])
    number = f"{count} or more" if options.filter and count == COUNTED else str(count)
    more = f" and {count - most} more" if count > most else ""
    return f"There {'is' if count == 1 else 'are'} {number} document{'s'[: count != 1]}: {titles}{more}."


def rule_report(rule: str, model: str, timer: StepTimer) -> Report:
    """Return the report of an answer that a rule gave: nothing was read.

    Args:
        rule: The rule.
        model: Name of the loaded model.
        timer: Steps of the request.
    """
    nothing, took = f"a rule answered: {rule}", timer.total()
    return Report(
        method="rule",
        prefill="dense",
        decode="dense",
        model=model,
        tokens=TokenCounts(0, 0.0, 0.0, 0, 0, 0.0, 0.0),
        ratios=Ratios(0.0, 0.0, 0.0, 0.0),
        cache=CacheReport(0, TierHits(), 0, ()),
        bytes=ByteCounts(0, 0, 0),
        prefilling=PrefillReport(None, None, nothing),
        decoding=DecodeReport(0, 0.0, 0.0, 0, "stop", nothing),
        timings_ms=Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, took, 0.0, took),
        chunks=(),
        rule=rule,
    )
