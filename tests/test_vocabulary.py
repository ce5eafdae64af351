"""One vocabulary: words that the project no longer uses, as names or in prose. docs/architecture.md has the words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.syntax import syntax_trees

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ragkv", "api", "ingest", "benchmarks", "tools", "tests")

CLASSES = {
    *("Talk", "Conversation", "Conversations", "Memory", "Begun", "Wanted", "Run", "Speech", "Spoken", "Way", "Watch"),
    *("Carrier", "Lent", "Coming", "Places", "Lists", "Sight", "Observed", "Elsewhere", "Absent", "Steps", "Replay"),
    *("Recorder", "Shelf", "Cupboard", "Line", "Asking", "Answering", "Worker", "Account", "Observe", "Strict", "Gate"),
    *("Holdings", "Papers", "Tally"),
}
FUNCTIONS = {
    *("begin", "finish", "sure", "heard", "advance", "choose", "spent", "carry", "lend", "borrow", "expect", "settle"),
    *("look", "watched", "pull", "follow", "grow", "remember", "forget", "mend", "qualify", "summarise", "talks"),
}
FIELDS = {
    *("talk", "talks", "begun", "wanted", "way", "speech", "spoken", "watch", "carry", "carrier", "lent", "coming"),
    *("places", "elsewhere", "absent", "shelf", "cupboard", "tally", "holdings", "reading", "speaking", "asking"),
    *("answering", "recorder", "shelves", "sight"),
}
MODULES = {
    *("talk", "conversations_manager", "begun", "watch", "carrier", "carry", "lists", "elsewhere", "deciding", "steps"),
    *(
        "replay",
        "recorder",
        "joined",
        "qualify",
        "fresh",
        "line",
        "asking",
        "answering",
        "worker",
        "account",
        "observe",
    ),
    *("strict", "sent", "holdings", "papers", "nouns", "words", "tally", "exposition", "summary", "retrieve"),
}
PUBLIC = {
    ("ragkv/client/models.py", "Conversation"),
    *(
        (f"ragkv/client/{file}.py", name)
        for file in ("asynchronous", "synchronous", "calls")
        for name in ("forget", "follow")
    ),
    ("benchmarks/decode_pool.py", "way"),
}
"""Names that users see, and that stay: a resource and two methods of the Python client, a field of a bench's JSON."""

PROSE = re.compile(
    r"\b(cupboard|shelf|shelves|carrier|begun|tally|holdings|lent|lend|lends|borrows?|mends?|mended|speech|elsewhere\.py)\b",
    re.IGNORECASE,
)
"""Old terms that plain English does not need."""


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    trees = syntax_trees(*(ROOT / folder for folder in FOLDERS))
    return tuple((str(path.relative_to(ROOT)), tree) for path, tree in trees)


def names(tree: ast.Module) -> Iterator[tuple[ast.AST, str, set[str]]]:
    """(node, a name that it defines, the words it must not be)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node, node.name, CLASSES
            for child in node.body:
                if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                    yield child, child.target.id, FIELDS
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.name, FUNCTIONS
            args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from ((arg, arg.arg, FIELDS) for arg in args)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr.lstrip("_"), FIELDS


def test_old_words_name_no_class_function_parameter_or_field() -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)} {name}"
        for path, tree in sources()
        for node, name, words in names(tree)
        if name in words and (path, name) not in PUBLIC
    ]
    assert not found, "\n".join(found)


def test_the_variable_of_a_loop_is_a_noun() -> None:
    """`each` and `found` say what nothing is. In a comprehension of one line they may stand."""
    loops = [
        f"{path}:{node.lineno} {ast.unparse(node.target)}"
        for path, tree in sources()
        if not path.startswith(("tests/", "tools/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.AsyncFor)
        and {"each", "found"} & {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    ]
    assert not loops, "\n".join(loops)


def test_old_words_name_no_module() -> None:
    found = [path for path, _ in sources() if Path(path).stem.removeprefix("test_") in MODULES]
    assert not found, "\n".join(found)


def prose() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").rglob("*.md"))):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            yield f"{path.relative_to(ROOT)}:{number}", line
    for name, tree in sources():
        if name.startswith(("tools/demo_model", "tests/", "ragkv/engine/needles")):
            continue  # what is said there are sentences of documents
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{name}:{node.lineno}", node.value


def test_docs_messages_and_docstrings_use_the_present_words() -> None:
    found = [f"{where}: {match.group()}" for where, text in prose() if (match := PROSE.search(text))]
    assert not found, "\n".join(found)


def test_the_walk_finds_what_it_looks_for() -> None:
    tree = ast.parse("class Shelf:\n    talk: int\n    def lend(self, watch):\n        self._carrier = watch")
    assert [name for _, name, words in names(tree) if name in words] == ["Shelf", "talk", "lend", "watch", "carrier"]
