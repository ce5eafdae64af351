"""Files in LongBench's format: passages, and errors for unusable lines."""

import json

import pytest

from benchmarks.longbench import longbench_sets, passages, shorten
from ragkv.errors import InputError
from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion

ENGLISH = """Passage 1:
Waldrada
Waldrada was the mistress of a king.

She had a son.

Passage 2:
Francia
The king ruled Francia. Passage 12: is no heading here.
"""
CHINESE = "文章1\n标题：长城\n长城很长。\n\n文章 2：\n标题：黄河\n黄河在中国。\n"


def whole(document):
    return [(document.title, document.text)]


def row(**changes):
    given = {"input": "Who ruled?", "context": ENGLISH, "answers": ["The king"], "language": "en", **changes}
    return json.dumps({name: value for name, value in given.items() if value is not None}, ensure_ascii=False)


def write(tmp_path, *lines):
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_passages_become_titled_documents():
    assert list(passages(ENGLISH, "x")) == [
        ("Waldrada", "Waldrada was the mistress of a king.\n\nShe had a son."),
        ("Francia", "The king ruled Francia. Passage 12: is no heading here."),
    ]
    assert list(passages(CHINESE, "x")) == [("长城", "长城很长。"), ("黄河", "黄河在中国。")]


def test_a_context_without_headings_is_one_document():
    assert list(passages("  One story.\nIts end. ", "qasper")) == [("qasper", "One story.\nIts end.")]
    assert list(passages("Before.\nPassage 1:\nOnly one line", "x")) == [("x", "Before."), ("x", "Only one line")]


def test_a_line_becomes_a_set_and_the_answer_is_found_where_it_stands_once(tmp_path):
    asked = longbench_sets(write(tmp_path, row(), "", row(context=CHINESE, answers=["黄河"], language="zh")), whole)
    assert [len(each.chunks) for each in asked] == [2, 2]
    question = asked[0].questions[0]
    assert (question.text, question.gold, question.language) == ("Who ruled?", ("The king",), "en")
    span = question.span
    assert asked[0].chunks[span.chunk][1][span.start : span.end] == "The king"
    assert asked[1].questions[0].language == "zh"
    assert [each.name[-7:] for each in asked] == ["jsonl:1", "jsonl:3"]


def test_an_answer_that_stands_twice_has_no_place(tmp_path):
    assert longbench_sets(write(tmp_path, row(answers=["king"])), whole)[0].questions[0].span is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object is wanted, not list"),
        (row(input=None), "`input` is missing"),
        (row(input=""), "`input` is empty"),
        (row(context=None), "`context` is missing"),
        (row(context=" \n"), "`context`"),
        (row(context="Passage 1:\n\nPassage 2:\n"), "`context` holds no text"),
        (row(context=7), "`context` is missing or no text"),
        (row(answers=None), "`answers` must be a list"),
        (row(answers=[]), "`answers` must be a list"),
        (row(answers=["a", 3]), "`answers` must be a list"),
        (row(language=3), "`language` must be text"),
    ],
)
def test_a_line_that_cannot_be_used_is_told_with_its_number(tmp_path, line, told):
    with pytest.raises(InputError, match=rf"hotpotqa\.jsonl:2: .*{told}"):
        longbench_sets(write(tmp_path, row(), line), whole)


def test_files_without_questions_or_text_are_told(tmp_path):
    with pytest.raises(InputError, match="no questions"):
        longbench_sets(write(tmp_path, "", " "), whole)
    with pytest.raises(InputError, match="No such file"):
        longbench_sets(tmp_path / "nothing.jsonl", whole)
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        longbench_sets(tmp_path / "bad.jsonl", whole)


def test_contexts_that_are_too_long_lose_chunks_from_their_middle():
    chunks = tuple((str(n), "x" * 10) for n in range(7))
    questions = tuple(SetQuestion("?", ("x",), "", GoldSpan(n, 0, 1)) for n in (0, 3, 6))
    short = shorten(QuestionSet(chunks, questions), lambda each: 10 * len(each.chunks), 45)
    assert [title for title, _ in short.chunks] == ["0", "1", "5", "6"]
    assert [q.span and q.span.chunk for q in short.questions] == [0, None, 3]
    assert shorten(short, lambda each: 10, 45) is short
