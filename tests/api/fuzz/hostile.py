"""Texts and JSON that parsers, patterns and limits stumble over: nested, long, repeated, and what is no text at all."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from typing import Any

from hypothesis import strategies as st

LARGE = 60_000
"""Characters of a hostile text. With what is around it, a request stays within 64 KB."""

COUNTS = (1, 1, 2, 3, 17, 300, 1_200, 2_500, 3_000, 10_000, 40_000)
"""How often a piece is repeated. Work that is quadratic shows from a thousand on, exponential work at thirty."""
DEPTHS = (2, 30, 100, 480, 600, 934, 960, 974, 978, 982, 1_000, 2_000, 5_000, 20_000)
"""How deep values are nested. Python's own limits are near a thousand frames; some of its functions take several."""

SPACES = (" ", "\t", "\n", "\r", "\r\n", " \n", "\n\n", "\u2028", "\u3000", "\xa0", "\v", "\x1c")
MARKS = (
    *(
        "`",
        "```",
        "~~~",
        "#",
        "# ",
        "[",
        "](",
        "[x](",
        "(",
        "<",
        "<a ",
        "<b>",
        "</b>",
        "<!--",
        "<![CDATA[",
        "&",
        "&amp;",
    ),
    *(
        "*",
        "**",
        "_",
        "-",
        "- ",
        "> ",
        "|",
        "|\n",
        "=",
        "'",
        '"',
        "\\",
        "/",
        ".",
        ",",
        ";",
        ":",
        "%",
        "$",
        "{",
        "}",
        "@",
    ),
)
LETTERS = (
    "a",
    "a ",
    "a\n",
    "word ",
    "1",
    "1,",
    "é",
    "e\u0301",
    "漢",
    "😀",
    "\u202e",
    "\ufeff",
    "\x00",
    "\x1b[31m",
    "ß",
    "İ",
)
WORDS = (
    *(
        "# a",
        "\n## ",
        "b",
        "---\n",
        "\n---\n",
        "user:",
        "user: a",
        "\nassistant:",
        "### Task:\n",
        '"title":',
        '"tags" :',
    ),
    *(
        "<chat_history>",
        "</chat_history>",
        "Conversation:",
        "<tool_call>",
        "<|im_start|>",
        "</s>",
        "<script>",
        "data: ",
    ),
    "Provide a concise, 5-word-or-less title for the conversation",
)


def runs(most: int = LARGE) -> st.SearchStrategy[str]:
    """Texts of one to five pieces, each of them repeated."""
    piece = st.sampled_from(SPACES) | st.sampled_from(MARKS) | st.sampled_from(LETTERS) | st.sampled_from(WORDS)
    repeated = st.tuples(piece, st.sampled_from(COUNTS)).map(lambda run: run[0] * run[1])
    return st.lists(repeated, min_size=1, max_size=5).map(lambda parts: "".join(parts)[:most])


HEADS = ("# a", "a\n## a", "user: a", "---\n", "```", "- ", "Conversation: a", "")
TASKS = (
    '### Task:\n{"title": "a"}\n<chat_history>',
    '### Task:\n{"title": "a"}\n<chat_history>user:',
    "Provide a concise, 5-word-or-less title for the conversation.\n",
    "Provide a concise, 5-word-or-less title for the conversation.\nConversation: a",
)
TAILS = ("b", "b", "", "</chat_history>", "\nassistant:", "#")


def grown(heads: tuple[str, ...] = HEADS) -> st.SearchStrategy[str]:
    """A head, a long run and a tail: what makes patterns with two ways through a run go back and forth.

    Args:
        heads: What may stand before the run.
    """
    piece = st.sampled_from(SPACES) | st.sampled_from(SPACES) | st.sampled_from((*MARKS, *LETTERS))
    run = st.tuples(piece, st.sampled_from((1_200, 3_000, 10_000, 40_000))).map(lambda run: run[0] * run[1])
    return st.tuples(st.sampled_from(heads), run, st.sampled_from(TAILS)).map(
        lambda parts: (parts[0] + parts[1])[: LARGE - 20] + parts[2]
    )


def texts() -> st.SearchStrategy[str]:
    """Any text: short, of every script, or one of those above."""
    return st.text(max_size=40) | runs() | grown() | grown((*HEADS, *TASKS, *TASKS))


def nested(depth: int, kind: str, closed: bool = True) -> str:
    """Make JSON that is nested this deep.

    Args:
        depth: Levels.
        kind: `[` for lists, `{` for objects, `[{` for both in turn.
        closed: Whether it is complete.
    """
    opening = {"[": "[", "{": '{"a":', "[{": '[{"a":'}[kind]
    closing = {"[": "]", "{": "}", "[{": "}]"}[kind]
    levels = min(depth // len(kind), LARGE // (len(opening) + len(closing)))
    return opening * levels + "1" + closing * levels * closed


def deep_json() -> st.SearchStrategy[str]:
    """Deeply nested JSON, most of it complete."""
    return st.builds(
        nested, st.sampled_from(DEPTHS), st.sampled_from(("[", "{", "[{")), st.sampled_from((True, True, False))
    )


NUMBERS = (
    *("-0", "1e999", "-1e999", "NaN", "-Infinity", "1e-999", "0.1e1", "1e5", "9" * 20, "-" + "9" * 40, "1" + "0" * 400),
    *(
        "1" + "0" * 5_000,
        "9" * 60_000,
        "1." + "0" * 5_000 + "1",
        "2147483648",
        "9223372036854775808",
        "01",
        "+1",
        "0x1",
    ),
)
STRANGE = (
    *(
        '"\\ud800"',
        '"\\udfff\\ud800"',
        '"a\\udc00b"',
        '"\\u0000"',
        '"\\uD83D\\uDE00"',
        '"\\ufffe"',
        '"\\x"',
        '"\t"',
        '"\\',
    ),
    *(
        "null",
        "true",
        "false",
        "undefined",
        "''",
        "{}",
        "[]",
        '""',
        '" "',
        "[null]",
        '{"":""}',
        "{,}",
        "[1,]",
        "/**/1",
        "",
    ),
    *(
        '{"a":1,"a":2}',
        '{"\\ud800":1}',
        '{"\\u0000":"\\u0000"}',
        '"../../etc/passwd"',
        '"default"',
        '"\\u2003"',
        '"\\u001b[31m"',
    ),
)


def wide_json() -> st.SearchStrategy[str]:
    """Lists and objects with thousands of members, and the same key over and over."""
    count = st.sampled_from((17, 101, 1_001, 3_000, 10_000))
    return st.one_of(
        count.map(lambda n: "[" + ",".join(["1"] * n) + "]"),
        count.map(lambda n: "[" + ",".join(['"a"'] * n) + "]"),
        count.map(lambda n: "[" + ",".join(["{}"] * n) + "]"),
        count.map(lambda n: "{" + ",".join(f'"{at}":{at}' for at in range(min(n, 5_000))) + "}"),
        count.map(lambda n: "{" + ",".join(['"a":1'] * n) + "}"),
        runs().map(lambda text: json.dumps({text: 1})),
        runs(2_000).map(lambda text: json.dumps([text] * 16)),
    )


def values() -> st.SearchStrategy[str]:
    """A hostile value as JSON text, or as what only resembles JSON."""
    return st.one_of(
        texts().map(json.dumps),
        deep_json(),
        texts().map(lambda text: json.dumps(text, ensure_ascii=False)),
        deep_json(),
        wide_json(),
        st.sampled_from(NUMBERS),
        st.sampled_from(STRANGE),
    )


@st.composite
def mutated(draw: st.DrawFn, body: Any) -> str:
    """JSON text of a body, changed in one place: a value, a member more, or a key that is there twice.

    Args:
        draw: Of hypothesis.
        body: A JSON value.
    """
    path = draw(st.sampled_from([*_places(body)]))
    fits = isinstance(reduce(getitem, path, body), str) and draw(st.booleans())
    raw = draw(texts().map(json.dumps) if fits else values())
    marked = _with(body, path, draw(st.sampled_from(("value", "value", "value", "member", "twice"))))
    return json.dumps(marked).replace(f'"{_MARK}"', raw).replace(_MARK, "")


_MARK = "@@here@@"


def _places(value: Any, at: tuple[Any, ...] = ()) -> Any:
    """Paths of all values inside a value, and its own."""
    yield at
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in members:
        yield from _places(inner, (*at, key))


def _with(value: Any, path: tuple[Any, ...], change: str) -> Any:
    if not path:
        if isinstance(value, dict) and change == "member":
            return {**value, "more": _MARK}
        return _MARK
    first, *rest = path
    if isinstance(value, list):
        return [_with(inner, tuple(rest), change) if at == first else inner for at, inner in enumerate(value)]
    if not rest and change == "twice":
        return {**value, _MARK + first: _MARK}
    return {**value, first: _with(value[first], tuple(rest), change)}
