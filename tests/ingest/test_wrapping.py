"""Lines that were broken to fit a width become paragraphs; what has breaks of its own keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ragkv.api.schemas.tools import IngestArguments
from ragkv.ingest.formats import eml
from ragkv.ingest.formats.flowed import flowed
from ragkv.ingest.formats.pdf_lines import flow
from ragkv.ingest.loader import parse
from ragkv.ingest.wrapping import unwrapped, unwrapped_in_place
from tests.growth import grows_linearly

LIMIT = 100_000
PROSE = (
    "The harbour of Tarn was built by the famous engineer Ada Maria\nBrook of Lindmouth in the year 1889. It has "
    "served the town for\nmore than a hundred years, and is still in use."
)
JOINED = PROSE.replace("\n", " ")
POEM = (
    "The sea is calm tonight.\nThe tide is full, the moon lies fair\nUpon the straits; on the French coast the light\n"
    "Gleams and is gone; the cliffs of England stand,"
)


@pytest.mark.parametrize("markdown", [True, False])
@pytest.mark.parametrize(
    ("text", "read"),
    [
        (PROSE, JOINED),
        (f"{PROSE}\n\n{PROSE}\n", f"{JOINED}\n\n{JOINED}\n"),
        ("The price of the bridge of Orrin was forty-eight and 48\n000 crowns in the end, not more.",
         "The price of the bridge of Orrin was forty-eight and 48 000 crowns in the end, not more."),
        ("> " + PROSE.replace("\n", "\n> ") + "\n\nI agree.", f"> {JOINED}\n\nI agree."),
        ("- " + PROSE.replace("\n", "\n  ") + "\n- two\n- three", f"- {JOINED}\n- two\n- three"),
        (f"1. {PROSE}\n2. two", f"1. {JOINED}\n2. two"),
        ("-   " + PROSE.replace("\n", "\n    ") + "\n-   two", f"-   {JOINED}\n-   two"),
        ("   o  " + PROSE.replace("\n", "\n      ") + "\n   o  two", f"   o  {JOINED}\n   o  two"),
        ("[^1]: " + PROSE.replace("\n", "\n    ") + "\n[^2]: two", f"[^1]: {JOINED}\n[^2]: two"),
        ("This is one of the problems of the harbour that need a self-\nservice desk.",
         "This is one of the problems of the harbour that need a self-service desk."),
        ("The harbour has boats and houses that were built in the pre-\nand the post-war years.",
         "The harbour has boats and houses that were built in the pre- and the post-war years."),
        ("港口由著名工程师建造这是一个很长的句子为了测试换行的处理方式是否正确\n成的文字。",
         "港口由著名工程师建造这是一个很长的句子为了测试换行的处理方式是否正确成的文字。"),
    ],
)  # fmt: skip
def test_lines_of_a_paragraph_are_joined(text: str, read: str, markdown: bool) -> None:
    assert unwrapped(text, markdown) == read


KEPT = {
    "poem": POEM,
    "song": "Roses are red,\nViolets are blue,\nSugar is sweet,\nAnd so are you.",
    "address": "Ada Brook\n12 Harbour Street\nTarn",
    "names": "Best regards\nVala Brook\nHarbour office",
    "list": "- one\n- two\n* three\n1) four\n(a) five",
    "boxes": "- [ ] one\n- [x] two",
    "code": "Run it:\n\n    make all the things that there are to be made\n    make install\n\nThen wait.",
    "fence": "```\nPRINT ALL THE LINES OF THIS FILE TO THE SCREEN OF\nthe machine\n```",
    "bars": "| Name | Town |\n|---|---|\n| Vala | Orrin |",
    "columns": "Name    Town    Pay\nVala    Orrin   10\nTimo    Lume    20",
    "tabs": "Name\tTown\nVala\tOrrin",
    "talk": "A: Who built the old harbour of Tarn, and what did the town pay for it in the end?\n"
    "B: It was built by Ada Maria Brook, and I do not know what the town paid for it.",
    "facts": "From: Ada\nTo: Ben\nDate: today",
    "title": "Title of the document\n=====================\nText.",
    "rule": "one\n\n---\n\ntwo",
}


@pytest.mark.parametrize("markdown", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_what_has_breaks_of_its_own_keeps_them(name: str, markdown: bool) -> None:
    assert unwrapped(KEPT[name], markdown) == KEPT[name]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("The price was 48\n000 crowns.\nNot more.", "The price was 48 000 crowns. Not more."),
        ("Ada Maria\nBrook built it.", "Ada Maria Brook built it."),
        ("one line that is longer than others  \nthe next\\\nline", None),
        (f"---\ntitle: a\nlong: b\n---\n{PROSE}", f"---\ntitle: a\nlong: b\n---\n{JOINED}"),
        (f"# Title\n{PROSE}\n## Next\n{PROSE}", f"# Title\n{JOINED}\n## Next\n{JOINED}"),
        (f"> {PROSE}", f"> {JOINED}"),
        ("> Who built it?\nAda Maria Brook did.", None),
        ("[a]: http://tarn.example\n[b]: http://orrin.example", None),
        ("<div>\n<p>a\n</div>", None),
        ("$$\nx\n= y\n$$", None),
    ],
)
def test_a_break_of_markdown_is_a_space_unless_its_author_says_otherwise(text: str, read: str | None) -> None:
    assert unwrapped(text, markdown=True) == (text if read is None else read)


@pytest.mark.parametrize(
    "text",
    [
        "roses are red\nviolets are blue\nsugar is sweet\nand so are you",
        "2026-01-02 12:00 started the crane\n2026-01-02 12:05 stopped the crane",
        "2026-01-02 12:00:00 started the crane, which was out of order for more than a week before\n"
        "2026-01-02 12:05:00 stopped the crane, for its cable was worn",
        "[02.01.26, 12:00:10] Ada: shall we meet at the crane of the old harbour tomorrow at noon?\n"
        "[02.01.26, 12:01:00] Ben: no, the road that leads to it is closed",
        "ERROR 2026-01-01 10:00:01 the crane of the harbour stopped at gate seven\n"
        "INFO 2026-01-01 10:01:00 all is well in the harbour and at the gates",
        "int main(void) {\n    return 0;\n}",
        "INTRODUCTION\nThe harbour of Tarn was built by the famous engineer Ada Maria.",
        f"One line.\n-- \nVala Brook\n{PROSE}",
        "apples\npears\nplums",
        "Orrin the grey,\nharbour of rain,\ncome the day,\ncome the grain.",
        "    It was a dark night.\n\n    Nobody was out.",
        'def upgrade() -> None:\n    """Create what is not there."""\n    _create_documents()\n    _create_chunks(1)',
        "rows = select(chunks.c.row, chunks.c.text).where(_MINE)\nmore = select(exists(select(1).select_from(chunks)))"
        "\n"
        "names = (rows, more)\n_OWN = select(collections.c.name)",
    ],
)
def test_short_lines_of_plain_text_stay(text: str) -> None:
    assert unwrapped(text) == text


@pytest.mark.parametrize(
    "text", ["One line.\n\nAnother line.\n", "One line.\n\nAnother line.\n\n", "One line.", "\n\n", ""]
)
def test_a_text_without_breaks_inside_paragraphs_is_the_same(text: str) -> None:
    assert unwrapped(text) is text


def test_wrapped_prose_in_json_becomes_one_line_and_keeps_its_offsets() -> None:
    text = f"# Harbour\n\n{PROSE}\n\n{POEM}\n\n```\n{PROSE}\n```\n\n{PROSE}\n"
    (document,) = parse(json.dumps({"id": "a", "text": text}).encode(), "a.jsonl", LIMIT)
    assert document.text == f"# Harbour\n\n{JOINED}\n\n{POEM}\n\n```\n{PROSE}\n```\n\n{JOINED}\n"
    assert len(document.text) == len(text)
    named = IngestArguments.model_validate({"documents": [{"id": "a", "text": text}]})
    assert [each.text for each in named.as_documents("default")] == [document.text]
    carried = text.replace("\n", "\r\n")
    assert unwrapped_in_place(carried) == carried, "two characters cannot become one"


SENT = {
    **KEPT,
    "sentences": "The harbour of Tarn was built by Ada Brook of the town of Lindmouth.\nIt is in use.\nIt is old.",
    "paragraphs": f"{'The harbour is old and the town is small. ' * 9}\nShe built it.",
    "hyphens": "This is one of the problems of the harbour that need a self-\nservice desk, and that is it.",
    "soft hyphens": "This is one of the problems of the harbour that need a ware\xad\nhouse, and that is it.",
    "quotation": "> " + PROSE.replace("\n", "\n> "),
    "narrow": "The harbour of Tarn was built\nby the famous engineer Ada\nMaria Brook of Lindmouth.",
}


@pytest.mark.parametrize("name", SENT)
def test_other_text_in_json_is_stored_as_it_was_sent(name: str) -> None:
    assert unwrapped_in_place(SENT[name]) == SENT[name]


def test_a_margin_is_no_mark_of_code_in_plain_text() -> None:
    margin = " " * 7 + PROSE.replace("\n", "\n       ")
    assert unwrapped(f"{margin}\n\n{margin}\n") == f"{JOINED}\n\n{JOINED}\n"
    assert unwrapped(margin, markdown=True) == margin


@pytest.mark.parametrize(
    "text",
    ["<pre>\nThe harbour is built of\ntwo walls.\n\nThe sea is calm and\nit is deep.\n</pre>",
     '+++\ntitle = "The harbour"\ndate = 2026\n+++', "::: note\nThe harbour is old.\n:::"],
)  # fmt: skip
def test_blocks_of_markdown_keep_their_breaks(text: str) -> None:
    assert unwrapped(f"{text}\n\n{PROSE}", markdown=True) == f"{text}\n\n{JOINED}"


def test_a_word_that_is_broken_is_whole_where_the_text_has_it_so() -> None:
    text = "The keeper kept all of his tools and his ropes in the old ware-\nhouse, at the quay of the harbour.{}"
    joined = text.replace("\n", "")
    assert unwrapped(text.format("")) == joined.format("")
    more = " No other warehouse is older."
    assert unwrapped(text.format(more)) == joined.replace("ware-house", "warehouse").format(more)
    both = f"{more} The ware-house."
    assert unwrapped(text.format(both)) == joined.format(both)
    assert unwrapped(text.format("\n\nThe warehouse."), markdown=True).startswith(f"{joined[:58]}warehouse, at")


def test_a_line_that_ends_in_a_hyphen_goes_on() -> None:
    text = "It was bought by Anne-\nMarie in the year of the great flood, when the harbour of the town was closed."
    assert unwrapped(text) == text.replace("\n", "")


def test_the_first_line_of_a_paragraph_may_be_indented() -> None:
    assert unwrapped(f"    {PROSE}\n\n    {PROSE}") == f"    {JOINED}\n\n    {JOINED}"


def test_files_are_read_without_their_wraps() -> None:
    (document,) = parse(PROSE.encode(), "a.txt", LIMIT)
    assert document.text == JOINED
    (document,) = parse(f"Harbour\n=======\n\n{PROSE}".replace("\n", "\r\n").encode(), "a.md", LIMIT)
    assert (document.title, document.text) == ("Harbour", f"Harbour\n=======\n\n{JOINED}")


def message(text: str, more: str = "") -> str:
    head = f"Subject: a\r\nContent-Type: text/plain; charset=utf-8{more}\r\n\r\n"
    return eml.parse((head + text.replace("\n", "\r\n")).encode(), LIMIT).text.removeprefix("# a\n\n")


def test_messages_are_read_without_their_wraps() -> None:
    assert message(f"Hi Ben,\n\n{PROSE}\n\nBest regards\nVala") == f"Hi Ben,\n\n{JOINED}\n\nBest regards\nVala"
    soft = "The crane \nlifts \nnine tons.\n> It \n> did.\n>> So?\nYes.\n-- \nVala \nBrook"
    assert message(soft, "; format=flowed") == "The crane lifts nine tons.\n> It did.\n> > So?\nYes.\n--\nVala Brook"
    assert message("kra \nne \nplus\n  stuffed", "; format=flowed; delsp=yes") == "krane plus\n stuffed".replace(
        "e p", "ep"
    )
    assert message(PROSE, "; format=flowed") == JOINED
    assert message("> > nine \n> > tons\n> So?", "; format=flowed") == "> > nine tons\n> So?"


LINES: dict[str, tuple[str, str]] = {
    "figures": ("The weight of the crane is\n50 tons", "The weight of the crane is 50 tons"),
    "a year": ("It was built in the year\n1889. It stands.", "It was built in the year 1889. It stands."),
    "a name": (PROSE.replace("Brook of", "Brook of"), JOINED),
    "a model": ("Model X\x02200 lifts.", "Model X-200 lifts."),
    "two names": ("Anne\x02Marie leads.", "Anne-Marie leads."),
    "prefix": ("The self\x02service desk", "The self-service desk"),
    "syllables": ("The ware\x02house is big.", "The warehouse is big."),
    "address": ("See http://a.org/long\x02name/page", "See http://a.org/long-name/page"),
    "spelt elsewhere": ("A cross\x02beam. The cross-beam.", "A cross-beam. The cross-beam."),
    "spelt as one": ("An e\x02mail. The email.", "An email. The email."),
    "three parts": ("state-of\x02the-art", "state-of-the-art"),
    "marked breaks": ("The ware‐\nhouse of gate\x02seven", "The warehouse of gate-seven"),
    "numbers": ("from 2025-\n2026 and 1990–\n1995", "from 2025-2026 and 1990–1995"),
    "minus": ("minus -\n5 degrees", "minus -5 degrees"),
    "folders": ("See http://a.org/b/\nc/d.html now", "See http://a.org/b/c/d.html now"),
    "domain": ("At www.a.\norg/b it is.", "At www.a.org/b it is."),
    "either": ("Turn the on/\noff switch", "Turn the on/off switch"),
    "name below a heading": (
        "The plan\nThe harbour of the town was built in the year of the flood by Ada\nMaria Brook.",
        "The plan\nThe harbour of the town was built in the year of the flood by Ada Maria Brook.",
    ),
    "letters": ("a) check the oil\nb) check the rope", ""),
    "few figures": ("Item 2025 2026\nrope 48 90\noil 5 7", ""),
    "no heading": ("so\n# make", "so\n    # make"),
    "heading": ("Harbours of the north\nThe harbour of Tarn is old and the town is small.", ""),
    "page number": ("the crane stands in the\n12", ""),
    "list": ("the rules are as follows\n1. Wait\n2. Go", ""),
    "rows": ("North of Tarn in all 1200 1300 1400 1500\nSouth of Tarn in all 1100 1000 1250 1300", ""),
    "poem": (POEM, ""),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_a_page_are_joined_where_they_go_on(name: str) -> None:
    page, read = LINES[name]
    assert flow(page) == (read or page)


GROWING: dict[str, Callable[[int], str]] = {
    "lines": lambda n: "and so on\n" * n,
    "quotations": lambda n: ">" * n + "\n" + "> " * n,
    "brackets": lambda n: "[" * n + "\n" + "a" * n,
    "hyphens": lambda n: "a-\n" * n,
    "paragraph": lambda n: f"{PROSE}\n" * n,
    "signs": lambda n: "-" * n + " x\n" + "=" * n + "x\n",
}


@pytest.mark.parametrize("name", GROWING)
def test_the_time_grows_with_the_text(name: str) -> None:
    for read in (unwrapped, unwrapped_in_place, flowed, flow, lambda text: unwrapped(text, markdown=True)):
        assert grows_linearly(read, GROWING[name], 3000)
