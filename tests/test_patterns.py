"""Every regular expression of the product takes a time that is linear in its text, whatever the text is.

The expressions are read from the syntax trees, so a new one is measured without being named here. Texts that make
backtracking grow are made from each expression's own parts: what stands before a repeat, then a long run, then a
character that spoils the match.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.growth import seconds

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ragkv", "api", "ingest")
MEASUREMENTS = {("ragkv", "tune"), ("ragkv", "evaluation")}
"""They run on a developer's own texts."""
CALLS = {"match", "fullmatch", "search", "findall", "finditer", "split", "sub", "subn"}
COMMON = (
    " ",
    "\t",
    "\n",
    "0",
    "a",
    "A",
    "_",
    '"',
    "'",
    "[",
    "(",
    "<",
    ">",
    "#",
    "-",
    ".",
    ",",
    "/",
    ":",
    "=",
    "@",
    "`",
)
ENDS = ("\x00", "\nx", "")
LONGEST = 6144
NOTICED = 0.02
"""Seconds of a run from which on its growth is measured. A linear run over LONGEST characters takes a twentieth."""


@dataclass(frozen=True)
class Expression:
    """A regular expression of the product, with the manners in which it is matched."""

    where: str
    pattern: str | bytes
    flags: int
    manners: frozenset[str]


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the strings and numbers that a module assigns to names."""
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            with suppress(NameError):  # of a string with something in it that is none of them
                value = value_of(node.value, values)
                values |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    return values


def is_call_of_re(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in {*CALLS, "compile"}
    )


def value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression that is fixed. Raises for any other."""
    return eval(compile(ast.Expression(node), "<pattern>", "eval"), {"re": re, **names})


def expressions(path: Path) -> Iterator[Expression]:
    tree = ast.parse(path.read_text("utf-8"))
    names = constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not is_call_of_re(node):
            continue
        assert isinstance(node.func, ast.Attribute)
        manner, where = node.func.attr, f"{path.relative_to(ROOT)}:{node.lineno}"
        try:
            pattern = value_of(node.args[0], names)
            given = [keyword.value for keyword in node.keywords if keyword.arg == "flags"]
            given += node.args[1:2] if manner == "compile" else []
            flags = int(value_of(given[0], names)) if given else 0
        except NameError:
            pytest.fail(f"{where} has a pattern that is not fixed: compare text with string methods")
        if manner == "compile" and not (manners := uses(tree, node)):
            manners = {"finditer"}  # used elsewhere: the manner that tries every place
        elif manner != "compile":
            manners = {manner}
        yield Expression(where, pattern, flags, frozenset(manners))


def uses(tree: ast.Module, call: ast.Call) -> set[str]:
    """Return the manners in which a module matches the expression that it compiles by this call."""
    named = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in named
        and node.attr in CALLS
    }


def product() -> Iterator[Expression]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] not in MEASUREMENTS:
                yield from expressions(path)


PRODUCT = list(product())


def sample(parsed: Any) -> str:
    """Return a short text that a part of an expression matches, look-arounds aside."""
    return "".join(map(sample_of, parsed))


def sample_of(step: tuple[Any, Any]) -> str:
    kind, value = str(step[0]), step[1]
    if kind == "LITERAL":
        return chr(value)
    if kind == "NOT_LITERAL":
        return "a" if value != ord("a") else "b"
    if kind == "ANY":
        return "a"
    if kind == "IN":
        return one_of(value)
    if kind == "BRANCH":
        return sample(value[1][0])
    if kind == "SUBPATTERN":
        return sample(value[3])
    if kind == "ATOMIC_GROUP":
        return sample(value)
    if "REPEAT" in kind:
        return sample(value[2]) * max(1, value[0])
    if kind == "ASSERT":
        return "" if value[0] > 0 else sample(value[1])
    return ""


def one_of(members: list[tuple[Any, Any]]) -> str:
    """Return a character of a set."""
    inside = re.compile("|".join(filter(None, map(class_of, members[1:] if is_negated(members) else members))) or "$^")
    wanted = (character for character in (*COMMON, *map(chr, range(33, 127)), "…", "。", "\x01"))
    return next((c for c in wanted if (inside.fullmatch(c) is None) == is_negated(members)), "a")


def is_negated(members: list[tuple[Any, Any]]) -> bool:
    return str(members[0][0]) == "NEGATE"


def class_of(member: tuple[Any, Any]) -> str:
    kind, value = str(member[0]), member[1]
    if kind == "LITERAL":
        return re.escape(chr(value))
    if kind == "RANGE":
        return f"[{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}]"
    short = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
    name = str(value).removeprefix("CATEGORY_")
    return short[name] if name in short else short[name.removeprefix("NOT_")].upper()


def parts(parsed: Any) -> Iterator[tuple[str, str]]:
    """Yield (what stands before, sample) for each repeat and each branch of an expression, nested ones included."""
    before = ""
    for step in parsed:
        kind, value = str(step[0]), step[1]
        inner = {"SUBPATTERN": lambda v: [v[3]], "BRANCH": lambda v: v[1], "ATOMIC_GROUP": lambda v: [v]}
        bodies = [value[2]] if "REPEAT" in kind else inner.get(kind, lambda v: [])(value)
        for body in bodies:
            yield before, sample(body)
            yield from ((before + deeper, run) for deeper, run in parts(body))
        before += sample_of(step)


def hostile(pattern: str | bytes, flags: int) -> Iterator[tuple[str, str, str]]:
    """Yield (beginning, what is repeated, end) of texts that may make an expression backtrack."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    parsed = re._parser.parse(text, flags & ~re.ASCII if isinstance(pattern, bytes) else flags)  # type: ignore[attr-defined]
    known = list(parts(parsed))
    beginnings = dict.fromkeys(["", sample(parsed), *(before for before, _ in known)])
    runs = dict.fromkeys([*COMMON, sample(parsed), *(run for _, run in known), *(b + run for b, run in known)])
    for beginning in beginnings:
        for run in filter(None, runs):
            for end in ENDS:
                yield beginning, run, end


def matcher(expression: re.Pattern[Any], manner: str) -> Any:
    if manner in ("match", "fullmatch", "search"):
        return getattr(expression, manner)
    return lambda text: sum(1 for _ in expression.finditer(text))


SIZES = [*range(8, 33, 3), 128, 1024, LONGEST]
"""What grows with a power of two is noticed at the small ones; what is cubic, at 1,024 before it takes minutes."""


def superlinear(pattern: str | bytes, flags: int, manners: frozenset[str]) -> str:
    """Return the text that makes matching grow faster than the text does; "" if none of them does."""
    compiled = re.compile(pattern, flags)
    for manner in sorted(manners):
        call = matcher(compiled, manner)
        for beginning, run, end in hostile(pattern, flags):

            def text(size: int, parts: tuple[str, str, str] = (beginning, run, end)) -> Any:
                made = parts[0] + parts[1] * (size // len(parts[1])) + parts[2]
                return made.encode("latin-1", "replace") if isinstance(pattern, bytes) else made

            for size in SIZES:
                started = time.thread_time()
                call(text(size))
                if time.thread_time() - started < NOTICED:
                    continue
                took, half = seconds(partial(call, text(size))), seconds(partial(call, text(size // 2)))
                if took > NOTICED / 2 and took > 3 * half:
                    return f"{manner}: {beginning!r} + {size // len(run)} * {run!r} + {end!r} takes {took:.3f} s"
                break
    return ""


def test_expressions_are_found() -> None:
    places = {expression.where.rpartition(":")[0] for expression in PRODUCT}
    assert {
        "ragkv/passages.py",
        "ingest/formats/csv.py",
        "api/observability/logs.py",
        "ragkv/catalog/full_text.py",
    } <= places
    assert len(PRODUCT) > 40


@pytest.mark.parametrize("expression", PRODUCT, ids=lambda expression: expression.where)
def test_no_text_makes_an_expression_take_more_than_linear_time(expression: Expression) -> None:
    assert superlinear(expression.pattern, expression.flags, expression.manners) == ""


@pytest.mark.parametrize(
    ("pattern", "flags", "manner"),
    [
        (r"^(a+)+$", 0, "match"),
        (r"(\w+\s?)*!", 0, "search"),
        (r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", 0, "match"),
        (r"<chat_history>\s*(.*?)\s*</chat_history>", re.DOTALL, "search"),
        (r"^\s*user:\s*(.*?)\s*(?:^\s*(?:assistant|ai):|\Z)", re.DOTALL | re.MULTILINE | re.I, "search"),
        (r"[+-]?[\d.,\s]*\d[\d.,\s]*%?", 0, "fullmatch"),
        (r'"[^"]*"|\\.|\[[^\]]*\]|_.', 0, "sub"),
        (rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE, "search"),
        (r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f:.]*:[0-9a-f:.]*", 0, "fullmatch"),
        (r"\s+$", 0, "search"),
    ],
)
def test_an_expression_that_backtracks_is_noticed(pattern: str | bytes, flags: int, manner: str) -> None:
    assert superlinear(pattern, flags, frozenset({manner}))
