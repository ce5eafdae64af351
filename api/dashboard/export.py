"""Exports the answers of a conversation, each with its rating: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from ragkv.api.dashboard.answer_text import describe_answer, describe_place, describe_searched
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.history import to_answer

_RATINGS = {"up": "rated good", "down": "rated bad"}
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#+|!~-])")


def as_markdown(answers: Sequence[RecordedAnswer]) -> str:
    """Return the answers as Markdown, in which text of users and documents has no markup."""
    parts = []
    for recorded in answers:
        answer = recorded.answer
        said = [describe_answer(answer, recorded.full_ms), _RATINGS.get(recorded.rating, "")]
        cited = [
            f"{number}. {_plain(each.title or each.document_id)}, "
            f"{_plain(describe_place(each))}: "
            f"{_plain(' '.join(each.text.split()))}"
            for number, each in enumerate(answer.citations, start=1)
            if each.marks
        ]
        when = datetime.fromtimestamp(recorded.when, UTC).strftime("%Y-%m-%d %H:%M UTC")
        facts = " · ".join(_plain(each) for each in (when, *filter(None, said)))
        searched = [] if cited else [_plain(describe_searched(answer))]
        parts.append("\n\n".join([f"## {_plain(answer.question)}", _plain(answer.answer), facts, *searched, *cited]))
    return "# Conversation\n\n" + "\n\n".join(parts) + "\n"


def as_json(answers: Sequence[RecordedAnswer], tenant: Tenant) -> str:
    """Return the answers as a JSON list, each as `GET /v1/answers/{answer_id}` has it."""
    return json.dumps([to_answer(each, tenant) for each in answers], ensure_ascii=False, indent=1) + "\n"


def _plain(text: str) -> str:
    """Return a text for one paragraph of Markdown, shown as it is."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
