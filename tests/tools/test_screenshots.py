"""The pictures of the docs are written in fewer bytes and show the same."""

from __future__ import annotations

from tools.screenshots import compacted


def test_a_matrix_keeps_its_factors_and_coordinates_are_rounded() -> None:
    line = '<use transform="matrix(0.75,0,0,0.75,563.25,362.25)" x="1.26"/>'
    assert compacted(line) == '<use transform="matrix(0.75,0,0,0.75,563.25,362.25)" x="1.3"/>\n'


def test_a_path_is_written_in_steps_from_point_to_point() -> None:
    steps = "M 0.5 -5.62 L 0.5 -6 C 1 1 2 2 3 3 Z M 4 4 L 5 4"
    path = f'<path style="fill-rule:nonzero;fill:rgb(0%,44.7%,69.8%);" d="{steps}"/>'
    assert compacted(path) == '<path style="fill:#0072b2;" d="m.5-5.6 0-.4c.5 7 1.5 8 2.5 9zm3.5 9.6 1 0"/>\n'


def test_a_path_has_no_space_before_a_point_and_no_end_that_draws_nothing() -> None:
    assert compacted('<path d="M 1.5 0.5 L 2 0.8 Z M 1.5 0.5"/>') == '<path d="m1.5.5.5.3z"/>\n'


def test_equal_clip_paths_are_one() -> None:
    clip = '<clipPath id="{}">\n<path d="M 0 0 L 1 1"/>\n</clipPath>\n'
    text = clip.format("clip-1") + clip.format("clip-2") + '<g clip-path="url(#clip-2)">\n</g>\n'
    assert (
        compacted(text)
        == '<clipPath id="clip-1">\n<path d="m0 0 1 1"/>\n</clipPath>\n<g clip-path="url(#clip-1)">\n</g>\n'
    )


def test_letters_of_one_style_share_a_group_and_others_do_not() -> None:
    letter = '<g style="fill:{}">\n<use x="1"/>\n</g>\n'
    assert compacted(letter.format("a") * 2) == '<g style="fill:a">\n<use x="1"/>\n<use x="1"/>\n</g>\n'
    for apart in (
        letter.format("a") + letter.format("b"),
        f'<g style="m">\n{letter.format("a")}</g>\n{letter.format("a")}',
    ):
        assert compacted(apart) == apart


def test_letters_that_are_indented_share_a_group_too() -> None:
    letter = '<g style="fill:a">\n  <use x="1"/>\n</g>\n'
    assert compacted(letter * 2) == '<g style="fill:a">\n<use x="1"/>\n<use x="1"/>\n</g>\n'


def test_the_letters_of_a_line_have_their_height_once() -> None:
    letters = "".join(f'<use href="#g{n}" x="{n}" y="2.5"/>\n' for n in range(7))
    line = compacted(f'<g style="fill:a">\n{letters}<use href="#g" x="1" y="9"/>\n</g>\n')
    assert line.startswith('<g style="fill:a">\n<g transform="translate(0 2.5)">\n<use href="#g0" x="0"/>\n')
    assert line.endswith('<use href="#g6" x="6"/>\n</g>\n<use href="#g" x="1" y="9"/>\n</g>\n')


def test_the_path_of_a_letter_needs_no_symbol() -> None:
    letter = '<symbol overflow="visible" id="glyph0-1">\n<path d="M 0 0 L 1 1"/>\n</symbol>\n'
    assert compacted(letter) == '<path id="g0-1" d="m0 0 1 1"/>\n'
