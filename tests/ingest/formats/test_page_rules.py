"""Style sheets of a page: which rules hold, for which elements, and what they say of letters off the line."""

from __future__ import annotations

import pytest

from ragkv.ingest.formats.html import parse

LIMIT = 100_000
GONE = "{display: none}"


def text(page: str, head: str = "") -> str:
    return parse(f"<!doctype html><meta charset=utf-8>{head}<body>{page}".encode(), LIMIT).text


@pytest.mark.parametrize(
    ("head", "page", "read"),
    [
        (f"<style>@media screen {{ .x {GONE} }} p {{color: red}}</style>", "<p class=x>a<p>b", "b"),
        (f"<style>@layer base {{ .x {GONE} }} @import 'a.css';</style>", "<p class=x>a<p>b", "b"),
        (f"<style>@supports (a: b) {{ @media only screen {{ .x {GONE} }} }}</style>", "<p class=x>a<p>b", "b"),
        (f"<style>@media (max-width: 9px) {{ .x {GONE} }} .y {GONE}</style>", "<p class=x>a<p class=y>b", "a"),
        (f"<style>@supports not (a: b) {{ .x {GONE} }}</style>", "<p class=x>a", "a"),
        (f"<style media=print>.x {GONE}</style>", "<p class=x>a", "a"),
        (f"<style>.t td:nth-child(2), th:nth-child(2) {GONE}</style>",
         "<table class=t><tr><th>Name<th>Pay<th>Town<tr><td>Vala<td>7<td>Orrin</table>", "Name | Town\nVala | Orrin"),
        (f"<style><!-- .x {GONE.upper()} --></style>", "<p class=x>a<p>b", "b"),
        (f"<style>.x {GONE}</style>", "<p class=x style='display: block'>a<p>b", "a\n\nb"),
        (f"<style>li:first-child {GONE}</style>", "<ul><li>a<li>b<li>c</ul>", "- b\n- c"),
        ("<style>tr.x {visibility: collapse}</style>", "<table><tr><td>a<tr class=x><td>b</table>", "a"),
        ("<style>.x {vertical-align: 0.5em; font-size: 70%}</style>", "10<b class=x>6</b> l", "10^6 l"),
        ("<style>.x {font-size: 7pt; position: relative; bottom: 3px}</style>", "10<b class=x>6</b> l", "10^6 l"),
        ("<style>.x {vertical-align: text-top; font-size: 7pt}</style>", "10<b class=x>6</b> l", "10^6 l"),
        ("<style>.x {font-variant-position: sub}</style>", "x<b class=x>1</b>", "x_1"),
        ("<style>.x {vertical-align: 0.5em}</style>", "10<b class=x>6</b> l", "106 l"),
        ("<style>.x {float: left; display: block}</style>", "<p><b class=x>T</b>he crane", "The crane"),
        ("<style>ol {list-style: lower-greek}</style>", "<ol><li>a<li>b</ol>", "α. a\nβ. b"),
    ],
)  # fmt: skip
def test_rules_that_hold(head: str, page: str, read: str) -> None:
    assert text(page, head) == read


@pytest.mark.parametrize(
    ("page", "read"),
    [
        ("10<b style='position:relative;bottom:.4em;font-size:60%'>6</b>", "10^6"),
        ("<ol><li style='list-style-type:upper-roman'>a<li style='list-style-type:upper-roman'>b</ol>", "I. a\nII. b"),
        ("<div role=row><i role=cell>a</i><i role=cell>b</i></div>", "a\nb"),
        ("<p>Team: <select><option>Quay<option selected>Harbour</select>", "Team: Harbour"),
        ("<p>Team: <input value=Harbour><input type=hidden value=x><input type=password value=x>", "Team: Harbour"),
        ("<p>Note: <textarea>Bring rope</textarea>", "Note: Bring rope"),
        ('<m:math xmlns:m="http://www.w3.org/1998/Math/MathML"><m:msup><m:mi>x</m:mi><m:mn>2</m:mn></m:msup></m:math>',
         "x^2"),
    ],
)  # fmt: skip
def test_what_elements_say_themselves(page: str, read: str) -> None:
    assert text(page) == read


def test_a_page_of_xml_may_have_a_prefix() -> None:
    page = '<?xml version="1.0"?><h:html xmlns:h="http://www.w3.org/1999/xhtml"><h:body><h:p>10<h:sup>6</h:sup></h:p>'
    assert parse(f"{page}</h:body></h:html>".encode(), LIMIT).text == "10^6"


def test_the_character_set_is_not_that_of_a_description() -> None:
    page = '<meta name="description" content="charset=utf-8"><meta charset=windows-1251><p>Привет'
    assert parse(page.encode("cp1251"), LIMIT).text == "Привет"
