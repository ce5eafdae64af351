"""The generator writes what it claims, the data order is fixed, and the trainer goes from nothing to weights."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ragkv.model.decoder import DecoderModel
from ragkv.model.prompt import Prompt
from tools.demo_model import cloze, near, swap, tokenizer, train
from tools.demo_model.bank import BankError, load, template
from tools.demo_model.evaluate import generated
from tools.demo_model.inflect import tidy
from tools.demo_model.optimiser import orthogonal
from tools.demo_model.page import Instance, stock
from tools.demo_model.page import load as load_pages
from tools.demo_model.questions import UNKNOWN
from tools.demo_model.recipe import BUNDLED, PROMPT, Recipe, Stage, config
from tools.demo_model.rows import ANSWER, PADDING, Batches, RowMaker
from tools.demo_model.shape import Shape
from tools.demo_model.task import Author
from tools.demo_model.team import Team
from tools.demo_model.values import Values

KIND = "kind firm\n  name: company\n  noun: firm\n  title: {e}\n"
ALONE = Team(0, 1, "cpu")
SEEDS = st.integers(0, 10**6)
SMALL = Recipe(
    (Stage(3, {256: 0.5, 512: 0.5}, 2e-3, 0.5, warmup=2), Stage(3, {512: 1.0}, 1e-3, 0.5, warmup=1)),
    batch=1024,
    vocabulary=2048,
    tokenizer_contexts=40,
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    mlp=128,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A work folder with a trained tokenizer."""
    work = tmp_path_factory.mktemp("demo_model")
    tokenizer.train(work / "tokenizer", SMALL.vocabulary, SMALL.seed, SMALL.tokenizer_contexts)
    near.make(work, ["kettle", "kettles", "boil", "roof", "attic", "captain", "skipper"])
    return work


@pytest.fixture(scope="module")
def rows(folder):
    """A row maker over that tokenizer."""
    trained = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return RowMaker(trained, Prompt(trained, PROMPT), Shape())


def author(seed: int, **shape: float) -> Author:
    return Author(Random(seed), load(), replace(Shape(), **shape))


# -- banks


def test_banks_cover_many_kinds_and_ways_of_asking():
    banks = load()
    facts = [fact for kind in banks.kinds for fact in kind.facts]
    assert len(banks.kinds) >= 30
    assert len(facts) >= 500
    assert sum(len(fact.say) for fact in facts) >= 3000
    assert sum(len(forms) for fact in facts for forms in fact.ask.values()) >= 5000


def test_a_slot_that_is_asked_for_but_never_said_is_an_error(tmp_path):
    (tmp_path / "bad.txt").write_text(f"{KIND}fact\n  say: {{e}} is old\n  ask year: When was {{e}} founded?\n")
    with pytest.raises(BankError, match="'year' is asked for but never said"):
        load(tmp_path)


def test_a_slot_that_nothing_fills_is_an_error(tmp_path):
    (tmp_path / "bad.txt").write_text(f"{KIND}fact\n  say: {{e}} has {{gizmo}}\n  ask gizmo: What has {{e}}?\n")
    with pytest.raises(BankError, match="gizmo"):
        load(tmp_path)


def test_articles_follow_the_word_behind_them():
    assert tidy("a oak door in the the hall of a old house") == "an oak door in the hall of an old house"
    assert template("{e} has {n} doors").opens
    assert not template("In {year}, {e} closed").opens


# -- pages


def test_every_answer_of_every_page_stands_in_a_piece_of_it():
    banks = load()
    for page in load_pages(frozenset(banks.lists)):
        instance = Instance(Values(Random(page.genre), banks.lists), page)
        for line in page.lines:
            answer = instance.answer(line.answer)
            assert line.kind == "none" or instance.place(line, answer), (page.genre, answer, instance.pieces)


def test_a_label_is_the_same_choice_wherever_it_stands(tmp_path):
    (tmp_path / "a.txt").write_text(
        "page note\n  title: A note\n  piece: {person} has a <c1:red/blue/green> <boat/cart>.\n\n    It is <c1>.\n"
        "  one: What colour is the boat of {person}? | Which colour did {person} choose? = <c1>\n  none: Who sold it?\n"
    )
    banks = load()
    (page,) = load_pages(frozenset(banks.lists), tmp_path)
    seen = set()
    for seed in range(20):
        instance = Instance(Values(Random(seed), banks.lists), page)
        colour = instance.answer(page.lines[0].answer)
        seen.add(colour)
        assert instance.pieces[0].endswith(f".\n\nIt is {colour}.")
        assert instance.pieces[0].split(" has ")[0] in instance.render(page.lines[0].wordings[1])
    assert seen == {"red", "blue", "green"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [("one: Where? = <x9>", "x9"), ("one: Where? = {gizmo}", "gizmo"), ("one: Where?", "without an answer")],
)
def test_a_page_with_a_mistake_is_refused(tmp_path, line, problem):
    (tmp_path / "bad.txt").write_text(f"page note\n  title: A note\n  piece: Nothing here.\n  {line}\n")
    with pytest.raises(BankError, match=problem):
        load_pages(frozenset(load().lists), tmp_path)


def test_with_other_words_every_answer_still_stands_in_the_text():
    banks = load()
    known = frozenset(banks.lists)
    changed = 0
    for page in load_pages(known)[::4]:
        instance = Instance(Values(Random(5), banks.lists), page, stock(known))
        changed += instance.titles != Instance(Values(Random(5), banks.lists), page).titles
        for line in page.lines:
            assert line.kind == "none" or instance.place(line, instance.answer(line.answer)), page.genre
    assert changed


def test_a_word_is_swapped_in_text_and_question_alike_and_keeps_its_form():
    assert swap.shared("He mended the bell. Bells rang in boats.", "Who mended the bell of the boat?") == ("mended",)
    assert (
        swap.put({"mended": "grated", "kettle": "ladder"}, "Mended kettle, mended well") == "Grated ladder, grated well"
    )
    others = swap.pool(["paints grating apples ringing ladder"])
    assert swap.swaps(Values(Random(0), {}), ["hopping"] * 9, others, frozenset({"ringing"})) == {"hopping": "grating"}


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_question_made_of_a_sentence_asks_for_what_stands_in_its_gap(seed):
    banks = load()
    v = Values(Random(seed), banks.lists)
    instance = Instance(v, v.one(load_pages(frozenset(banks.lists))))
    whole = "\n".join(instance.pieces)
    for gap in cloze.gaps(instance.pieces, instance.values):
        text = instance.pieces[gap.piece]
        assert text[gap.start : gap.start + len(gap.value)] == gap.value
        assert whole.count(gap.value) == 1
        asked = cloze.ask(v, text, gap)
        assert not asked or asked.endswith("?")
        kept = [word for word in re.findall(r"[\w'’-]+", asked)[:-1] if word in text]
        assert not asked or len(kept) >= 1


def test_a_near_word_takes_the_place_of_one_word_of_a_question(folder):
    words = near.load(folder)
    assert words["captain"] == ["skipper"]
    assert set(words["kettle"]) == {"kettles", "boil"}
    text = near.put(Values(Random(1), {}), {"roof": ["attic"]}, "Who mended the roof of Roofton-roof?")
    assert text == "Who mended the attic of Roofton-roof?"
    assert near.put(Values(Random(1), {}), {}, "Who?") == "Who?"


def test_evaluation_asks_nothing_that_only_training_wants():
    shape = BUNDLED.stages[-1].shape
    assert (shape.swap, shape.cloze, shape.near) != (0, 0, 0)
    assert shape.unaided() == replace(shape, swap=0, cloze=0, near=0)


def test_twin_pages_share_a_title_and_are_asked_by_name():
    shared = 0
    for seed in range(30):
        writer = author(seed, page=1.0, twin=1.0, lost=0.0, absent_questions=0.0)
        told = [story for story in writer.stories(600, 110, 10) if story.twin]
        first, second = list({id(story.instance): story.instance for story in told}.values())[:2]
        both = [story for story in told if story.instance in (first, second)]
        shared += any(a == b for a, b in zip(first.titles, second.titles, strict=True))
        assert first.page is second.page
        assert first.pieces != second.pieces
        for asked in writer.arrange(both, 100).asked:
            named = [each for each in (first, second) if any(value in asked.text for value in each.values.values())]
            assert asked.kind == "none" or named or asked.text.lower() == asked.text
    assert shared > 15


FOLDER = """page folder
  title: The {ship}
  piece: The {ship} was built by {company}.
  piece: She sank in {year}.
  title: A letter
  piece: I worked for {company}, says {person}, when they made <k1:buttons/spoons> too.
  one: What does {person} say they made? = <k1>
  two: What else did the builder of the {ship} make? = <k1>
  coref: When did the {ship} sink? = {year}
"""


def test_the_documents_of_a_folder_are_told_apart_and_share_their_names(tmp_path):
    (tmp_path / "a.txt").write_text(FOLDER)
    banks = load()
    (page,) = load_pages(frozenset(banks.lists), tmp_path)
    writer = author(1, lost=0.0, absent_questions=0.0, cloze=0.0, twin=0.0)
    ship, letter = writer._pages_of(page, 8)
    assert (len(ship.pieces), len(letter.pieces), letter.first) == (2, 1, 2)
    assert ship.title != letter.title
    asked = {q.kind: q for seed in range(9) for q in author(seed, lost=0.0).arrange([ship, letter], 3).asked}
    chunks = writer.arrange([ship, letter], 3).chunks
    assert {title for title, _ in chunks} == {ship.title, letter.title}
    assert asked["two"].answer == asked["one"].answer
    assert asked["two"].answer in letter.pieces[0]


def test_a_question_across_documents_is_not_asked_when_one_is_missing(tmp_path):
    (tmp_path / "a.txt").write_text(FOLDER)
    banks = load()
    (page,) = load_pages(frozenset(banks.lists), tmp_path)
    for seed in range(20):
        writer = author(seed, absent_questions=0.0, cloze=0.0, lost=0.0, twin=0.0)
        ship, letter = writer._pages_of(page, 8)
        assert {q.kind for q in writer.arrange([letter], 9).asked} <= {"one", "none"}
        assert not any(q.answer in letter.pieces[0] for q in writer.arrange([ship], 9).asked if q.kind != "none")


# -- contexts


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_every_answer_stands_where_the_question_says(seed):
    context = author(seed).context(400, 100, 8, 20)
    for asked in context.asked:
        assert asked.text
        assert asked.answer
        if asked.kind == "none":
            assert asked.answer == UNKNOWN
            assert asked.chunk == -1
        else:
            _, text = context.chunks[asked.chunk]
            assert text[asked.start : asked.start + len(asked.answer)] == asked.answer
    assert all(n < 2 for n in Counter(asked.text.lower() for asked in context.asked).values())


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_the_same_seed_writes_the_same_context(seed):
    assert author(seed).context(200, 80, 6, 10) == author(seed).context(200, 80, 6, 10)


@pytest.mark.soak
def test_another_process_writes_the_same_context():
    """Whatever order its sets have."""
    program = (
        "from random import Random; from tools.demo_model.bank import load; from tools.demo_model.task import Author; "
        "print([Author(Random(seed), load()).context(600, 90, 6, 12) for seed in range(2)])"
    )
    given = os.environ | {"PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert there.stdout == f"{[author(seed).context(600, 90, 6, 12) for seed in range(2)]}\n"


def test_all_kinds_of_questions_are_asked():
    kinds = Counter(asked.kind for seed in range(30) for asked in author(seed).context(700, 120, 12, 40).asked)
    total = kinds.total()
    assert kinds["one"] > 0.3 * total
    assert all(kinds[kind] > 0.08 * total for kind in ("coref", "two"))
    assert 0.03 * total < kinds["none"] < 0.2 * total


def test_a_claim_that_is_not_named_in_its_piece_is_named_in_another():
    found = 0
    for seed in range(50):
        for story in author(seed).stories(500, 90, 8):
            for claim in story.claims:
                name, home = claim.subject.name, story.pieces[claim.piece]
                assert claim.sentence in home
                if not claim.named and not claim.nameless:
                    found += 1
                    assert name not in home
                    assert name not in story.title
                    assert any(name in text for text in story.pieces)
    assert found > 100


def test_linked_subjects_are_asked_for_by_two_hops():
    asked = [
        q
        for seed in range(8)
        for q in author(seed, none=0, two=1.0, coref=0, page=0.5).context(1500, 120, 14, 40).asked
    ]
    assert sum(q.kind == "two" for q in asked) > 0.15 * len(asked)


# -- rows


def test_rows_are_built_from_the_prompt_of_the_service(rows, folder):
    trained = AutoTokenizer.from_pretrained(folder / "tokenizer")
    prompt = Prompt(trained, PROMPT)
    context = author(3).context(150, 60, 4, 3)
    row = rows._pack(context, 2048)
    expected = [*prompt.prefix]
    for title, text in context.chunks:
        expected += prompt.chunk(title, text)
    for asked in context.asked:
        expected += [*prompt.question(asked.text), *prompt.plain(f" {asked.answer}"), trained.eos_token_id]
    assert row.ids[: len(expected)].tolist() == expected
    assert (row.ids[len(expected) :] == trained.pad_token_id).all()


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, length=st.sampled_from((512, 1024, 4096)))
def test_rows_mark_answers_up_to_their_end_token(rows, seed, length):
    row = rows.row(Random(seed), length)
    used = int((row.weights != PADDING).sum())
    assert len(row.ids) == length
    assert (row.weights[used:] == PADDING).all()
    ends = row.ids == 1
    assert (row.weights[ends] == ANSWER).all()
    assert (row.weights == ANSWER).any() == ends.any()


def test_rows_are_mostly_full_and_hold_answers(rows):
    made = [rows.row(Random(seed), 2048) for seed in range(24)]
    assert sum((row.weights != PADDING).mean() for row in made) > 0.75 * len(made)
    assert sum((row.weights == ANSWER).mean() for row in made) > 0.04 * len(made)


def test_batch_n_does_not_depend_on_what_was_made_before(rows):
    def batches():
        return Batches(rows, [256, 512, 256], 1024, 4, ALONE)

    third = batches()[2]
    ordered = [batches()[n] for n in range(3)]
    assert torch.equal(third[0], ordered[2][0])
    assert torch.equal(third[1], ordered[2][1])
    assert not torch.equal(ordered[0][0], ordered[2][0])
    assert [ids.shape for ids, _ in ordered] == [(4, 256), (2, 512), (4, 256)]


# -- tokenizer and trainer


def test_any_string_survives_the_tokenizer(folder):
    trained = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for text in ("Ærø 12,500 kg", "日本語 و العربية", "\ttabs  and   spaces\n", "🦊 </s>"):
        ids = trained(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert trained.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(trained("2031", add_special_tokens=False)["input_ids"]) == 4


def test_the_tokenizer_is_a_function_of_its_seed(folder, tmp_path):
    tokenizer.train(tmp_path, SMALL.vocabulary, SMALL.seed, SMALL.tokenizer_contexts)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer" / "tokenizer.json").read_bytes()


def test_orthogonal_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 16, 48), (1, 48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_training_goes_from_nothing_to_a_model_that_the_service_loads(folder, monkeypatch):
    """Stopped in the middle and resumed, it ends with the same weights as in one go."""
    monkeypatch.setattr(train, "EVERY", 1)
    monkeypatch.setattr(train, "PAUSE", 1)
    said: list[str] = []
    run = train.TrainingRun(SMALL, folder, ALONE, 0, said.append)
    assert not run.train(until=time.monotonic())
    assert run.place.step == 1
    run = train.TrainingRun(SMALL, folder, ALONE, 0, said.append)
    assert run.train(until=float("inf"))
    assert any("resumed at stage 1, step 1" in line for line in said)
    losses = [float(line.split("context ")[1]) for line in said if "context" in line]
    assert losses[-1] < losses[0]
    run.export(folder / "model")

    (folder / "checkpoint.pt").unlink()
    again = train.TrainingRun(SMALL, folder, ALONE, 0, said.append)
    again.train(until=float("inf"))
    pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    model = DecoderModel.load(str(folder / "model"), "cpu")
    assert model.profile.chunk == PROMPT.chunk
    assert model.profile.chunk_tokens == 512
    assert generated(model, 3000, sets=1, questions=4)[0].questions


TWO = """
import sys
from pathlib import Path
from tools.demo_model.recipe import Recipe, Stage
from tools.demo_model.shape import Shape
from tools.demo_model.team import Team
from tools.demo_model.train import TrainingRun

team = Team.join("cpu")
run = TrainingRun({recipe}, Path(sys.argv[1]), team, 0, lambda line: None)
assert run.train(float("inf"))
if team.rank == 0:
    run.export(Path(sys.argv[1]) / "together")
team.leave()
"""


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_two_processes_take_the_steps_of_one(folder):
    """The same rows, the same gradients; float32 adds them up in another order."""
    recipe = replace(SMALL, dropout=0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO.format(recipe=recipe), str(folder)]
    both = [subprocess.Popen(command, env=os.environ | places | {"RANK": str(rank)}) for rank in range(2)]
    assert [each.wait(150) for each in both] == [0, 0]

    (folder / "checkpoint.pt").unlink()
    alone = train.TrainingRun(recipe, folder, ALONE, 0, lambda line: None)
    alone.export(folder / "before")
    alone.train(until=float("inf"))
    alone.export(folder / "alone")
    before, one, two = (load_file(folder / name / "model.safetensors") for name in ("before", "alone", "together"))
    moved = sum((one[name] - before[name]).float().square().sum() for name in one)
    apart = sum((one[name] - two[name]).float().square().sum() for name in one)
    print(apart, moved)
    assert apart < 0.01 * moved


def test_the_bundled_recipe_fits_its_promise():
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config(BUNDLED))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters <= 24_000_000
    assert 2 * parameters < 50_000_000
    assert {1024, 2048, 4096, 8192} <= {length for stage in BUNDLED.stages for length in stage.mix}
