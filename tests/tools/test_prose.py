"""The readers of documentation packages, on samples."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from tools.prose import entries, readers, synonyms
from tools.prose.__main__ import READERS
from tools.prose.packages import sources
from tools.prose.passages import passages
from tools.prose.sections import Section, entitled, prose

LINE = "The harbour of Tarn was built in 1889 by the engineer Ada Brook, and it is the largest one of the coast."


def test_html_gives_sections_without_navigation_and_code() -> None:
    page = (
        f"<html><head><title>Tarn</title></head><body><div class='navheader'>Prev Next</div><h1>Tarn</h1><p>{LINE}</p>"
        f"<pre>rm -rf</pre><h2>2.1. Piers</h2><ul><li><p>{LINE}</p></li></ul><table><tr><td>x</td></tr></table>"
        f"<div class='para'>Seven piers [1] .</div></body></html>"
    )
    assert list(readers.html("a", page, "Ports")) == [
        Section("a", "Ports: Tarn", (LINE,)),
        Section("a", "Ports: Piers", (LINE, "Seven piers.")),
    ]


def test_docbook_and_mallard_are_read_as_html() -> None:
    page = f'<?xml version="1.0"?><sect1 id="x"><title>Stars of &kstars;</title><para>{LINE}<br/></para></sect1>'
    assert list(readers.html("a", page, "Sky")) == [Section("a", "Sky: Stars of kstars", (LINE,))]


def test_pod_gives_headings_and_plain_paragraphs() -> None:
    data = "=head1 NAME\n\nB<perl> is L<a language|perlintro>\n\n    code\n\n=head2 History\n\nLarry\nWall wrote it.\n"
    assert list(readers.pod("p", data, "Perl")) == [
        Section("p", "Perl: NAME", ("perl is a language",)),
        Section("p", "Perl: History", ("Larry Wall wrote it.",)),
    ]


def test_dictionary_entries_lose_labels_links_and_dates() -> None:
    data = "Actors\n\n   <theory> A model for {concurrency}\n   by {Carl Hewitt}.\n\n   (1999-11-23)\n\nnext\n\n   x\n"
    first = next(entries.dictionary("d", data))
    assert first == Section("d", "Actors", ("A model for concurrency by Carl Hewitt.",))


def test_help_texts_of_games() -> None:
    rules = '[nation]\nname=_("Aztec")\nlegend=_("The Aztecs ruled\\\n Mexico. They fell in 1521.")\nx=1\n'
    assert list(entries.ruleset("r", f"\n{rules}")) == [
        Section("r", "Aztec", ("The Aztecs ruled Mexico. They fell in 1521.",))
    ]
    assert list(entries.described("c", "%%\nx\n%%%%\nAgnes\n\nOld and wise.\n")) == [
        Section("c", "Agnes", ("Old and wise.",))
    ]
    planet = "\nplanet Ada\n\tdescription `Ada is a home.`\n\tspaceport `The port is busy.`\n"
    assert list(entries.planets("e", planet, "Sky")) == [
        Section("e", "Sky: Ada", ("Ada is a home.", "The port is busy."))
    ]


def test_sword_modules_give_chapters(tmp_path: Path) -> None:
    text = '<chapter n="1" osisID="Mark.1" sID="Mark.1"/><w lemma="x">The</w> <w>beginning</w> , <note>no</note> of it.'
    packed = zlib.compress(text.encode())
    (tmp_path / "nt.bzz").write_bytes(packed)
    (tmp_path / "nt.bzs").write_bytes(struct.pack("<III", 0, len(packed), len(text)))
    assert list(entries.sword("s", tmp_path / "nt.bzz", "Bible")) == [
        Section("s", "Bible: Mark 1", ("The beginning, of it.",))
    ]


def test_passages_keep_paragraphs_and_leave_out_tables() -> None:
    table = "x 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"
    (found,) = passages([Section("d", "Tarn", (LINE, table, LINE, LINE))])
    assert found.text == f"{LINE}\n\n{LINE}\n\n{LINE}"
    assert not list(passages([Section("d", "Tarn", (LINE,))]))
    long = list(passages([Section("d", "Tarn", (" ".join([LINE] * 60),))]))
    assert all(60 <= len(each.text.split()) <= 350 for each in long)


def test_titles_and_prose() -> None:
    assert entitled("Guide", "Chapter 3. Ports") == "Guide: Ports"
    assert entitled("Guide", "") == "Guide"
    assert prose(LINE)
    assert not prose("int main(void) { return x[0] + y[1]; }")
    assert not prose("Contents . . . . . . . . 7")


def test_the_recipe_is_whole() -> None:
    for source in sources():
        assert source.reader in {*READERS, "sword"}
        assert len(source.sha256) == 64
        assert source.licence
        assert source.files


def test_synonyms_are_the_words_of_the_commonest_sense() -> None:
    data = b"  1 licence\n"
    offset = len(data)
    data += b"00000012 41 v 03 establish 0 found 1 set_up 0 001 @ 00000000 v 0000 | begin\n"
    index = (
        "  1 licence\n"
        f"establish v 2 1 @ 2 2 {offset:08d} {offset:08d}  \n"
        f"unseen v 1 1 @ 1 0 {offset:08d}  \n"
        f"be v 1 1 @ 1 1 {offset:08d}  \n"
    )
    assert dict(synonyms._read(index, data, "v")) == {"establish": ["found"]}
