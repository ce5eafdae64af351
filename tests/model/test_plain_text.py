"""No text from outside makes a token that a tokenizer knows as one added word, whatever the tokenizer is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ragkv.errors import ModelNotFound
from ragkv.model.plain_text import added_words, plain_encoder
from ragkv.model.profile import Profile
from ragkv.model.prompt import Prompt
from ragkv.model.source import default_gguf

SPECIAL = (
    "<s> </s> <unk> <pad> <|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|end_of_text|> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> [INST] [/INST] [CLS] [SEP] [MASK] <bos> <eos> <start_of_turn> <end_of_turn> "
    "<｜User｜> <｜end▁of▁sentence｜>"
).split()
WORDS = (
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <|fim_prefix|> <|fim_suffix|> "
    "<|repo_name|> <|file_sep|> <|box_start|> <table> [TOOL_CALLS] [AVAILABLE_TOOLS] <|python_tag|> <image>"
).split()
TEXTS = (*SPECIAL, *WORDS)
SPACES = ("\n", "\n\n", "    ")
PROSE = (
    "The harbour of Tarn was built in 1889 by Ada Brook. It cost 40 marks; a lamp burns there, and no one knows why.\n"
)
LETTERS = "".join((*map(chr, range(32, 127)), *TEXTS, *SPACES))


def added(text: str) -> AddedToken:
    """An added token, with other properties for each word."""
    number = sum(map(ord, text))
    return AddedToken(
        text,
        special=text in SPECIAL,
        normalized=number % 2 == 0,
        lstrip=number % 3 == 0,
        rstrip=number % 5 == 0,
        single_word=number % 7 == 0 and text in WORDS,
    )


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([PROSE] * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return made


def byte_level_that_looks_words_up() -> Tokenizer:
    """As Llama 3: a word that is in the vocabulary is one token, whatever the merges make of it."""
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {word: len(vocabulary) + place for place, word in enumerate(TEXTS)}
    made = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def merged() -> Tokenizer:
    """As Gemma: merges make the words."""
    letters = sorted(set(LETTERS))
    vocabulary, merges = {letter: id for id, letter in enumerate(letters)}, []
    for word in TEXTS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.decoder = decoders.Fuse()
    return made


def unigram() -> Tokenizer:
    letters = sorted({*LETTERS, "▁"} - {" "})
    pieces = [
        ("<unk>", 0.0),
        *((word, -0.5) for word in TEXTS if word != "<unk>"),
        *((it, -3.0) for it in letters),
    ]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    letters = sorted(set(LETTERS.lower()) - {" ", "\n"})
    vocabulary = {piece: id for id, piece in enumerate(["[UNK]", *TEXTS, *letters, *(f"##{it}" for it in letters)])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def whole_words() -> Tokenizer:
    known = dict.fromkeys(["<unk>", *TEXTS, *PROSE.split()])
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


class Letters(transformers.PythonBackend):
    """A slow tokenizer that looks whole words up, and reads other words letter by letter."""

    def __init__(self, **settings: Any):
        self.letters = {letter: id for id, letter in enumerate(sorted(set(LETTERS)))}
        super().__init__(**settings)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {**self.letters, **self.get_added_vocab()}

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        known = self.get_added_vocab()
        return [part for word in text.split(" ") for part in ([word] if word in known else word)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters[token]

    def _convert_id_to_token(self, index: int) -> str:
        return next(letter for letter, id in self.letters.items() if id == index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


MADE: list[Callable[[], Any]] = [
    *(byte_level, byte_level_that_looks_words_up, merged, unigram, word_piece, whole_words),
    lambda: Letters(),
]
NAMES = ["byte-level", "ignores merges", "merged", "unigram", "word pieces", "whole words", "slow"]


def with_words(made: Any) -> Any:
    """Return a tokenizer of transformers that knows all words of TEXTS as added tokens, some of them special."""
    if isinstance(made, Tokenizer):
        unknown = next((word for word in ("<unk>", "[UNK]") if made.token_to_id(word) is not None), None)
        given = {} if unknown is None else {"unk_token": unknown}
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **given)
    for text in TEXTS:
        made.add_tokens([added(text)], special_tokens=text in SPECIAL)
    assert len(added_words(made)) >= len(TEXTS)
    return made


def places(prompt: Prompt, text: str) -> dict[str, list[int]]:
    """Return the token ids that a text makes in each place of a prompt."""
    return {
        "title": [*prompt.chunk(f"a{text}b", "c")],
        "text": [*prompt.chunk("a", f"b {text} c{text}")],
        "text alone": [*prompt.chunk("", text)],
        "question": [*prompt.question(f"{text} a {text}")],
        "earlier question": [*prompt.question("a", [(f"b{text}", "c")])],
        "earlier answer": [*prompt.question("a", [("b", f"{text}{text}c")])],
        "instructions": [*prompt.question("a", (), f"b {text}\n{text}")],
        "answer": [*prompt.answer(text), *prompt.retold(f"a {text}"), *prompt.answered((), f"{text} a")[1]],
    }


@pytest.mark.parametrize("make", MADE, ids=NAMES)
def test_no_word_becomes_an_added_token_in_any_place(make: Callable[[], Any]) -> None:
    tokenizer = with_words(make())
    prompt = Prompt(tokenizer, Profile(question="Question: {question}\nAnswer:"))
    forbidden = added_words(tokenizer)
    if make in (word_piece, whole_words):  # they do not know all characters
        forbidden.pop(tokenizer.unk_token_id)
    texts = [text for text in (*TEXTS, *(text[:-1] for text in TEXTS), " ".join(TEXTS), "".join(TEXTS)) if text]
    for text in texts:
        for place, ids in places(prompt, text).items():
            assert not forbidden.keys() & set(ids), (place, text, [forbidden[id] for id in ids if id in forbidden])


@pytest.mark.parametrize("make", [byte_level, merged, unigram], ids=["byte-level", "merged", "unigram"])
def test_a_word_is_read_as_its_characters(make: Callable[[], Tokenizer]) -> None:
    tokenizer = with_words(make())
    encode = plain_encoder(tokenizer)
    for text in ("a <tool_call> b", "The lamp.</s> No one knows.", "<unk>"):
        assert "".join(tokenizer.decode(encode(text)).split()) == "".join(text.split())


@pytest.mark.parametrize("make", MADE, ids=NAMES)
def test_a_text_without_added_words_keeps_its_tokens(make: Callable[[], Any]) -> None:
    tokenizer = with_words(make())
    encode = plain_encoder(tokenizer)
    for text in (PROSE.strip(), *PROSE.split(), "a"):
        assert encode(text) == tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_the_unknown_token_still_stands_for_unknown_characters() -> None:
    tokenizer = with_words(unigram())
    unknown = tokenizer.unk_token_id
    encode = plain_encoder(tokenizer)
    assert unknown in encode("好")
    assert unknown not in encode("<unk>")
    assert encode("好 <unk>").count(unknown) == 1


def test_a_tokenizer_with_a_part_in_python_is_cut_like_slow_ones() -> None:
    class Spaces:
        def pre_tokenize(self, pretokenized: Any) -> None:
            pretokenized.split(lambda number, text: text.split(" ", "removed"))

    made = whole_words()
    made.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Spaces())
    made.add_tokens([added(text) for text in WORDS])

    class Fast:
        backend_tokenizer, all_special_ids, all_special_tokens = made, (), ()
        added_tokens_decoder = made.get_added_tokens_decoder()

        def get_added_vocab(self) -> dict[str, int]:
            return {}

    ids = plain_encoder(Fast())("Ada <tool_call> Brook.")
    assert made.token_to_id("Ada") in ids
    assert made.token_to_id("<tool_call>") not in ids


def shipped(name: str, folder: Path) -> Any:
    if name == "tiny":
        return transformers.AutoTokenizer.from_pretrained(folder)
    try:
        path = default_gguf()
    except ModelNotFound as error:
        pytest.skip(str(error))
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("name", ["tiny", "default"])
def test_the_models_that_ship_read_ordinary_text_as_before(name: str, tiny_folder: Path, root: Path) -> None:
    tokenizer = shipped(name, tiny_folder)
    prompt = Prompt(tokenizer, Profile())
    known = added_words(tokenizer)
    words = [word for word in known.values() if word]
    pages = [
        path.read_text("utf-8") for folder in ("docs", "ragkv/samples") for path in sorted((root / folder).glob("*.*"))
    ]
    texts = [*pages, "    ", "\n\n\n", "好。 👩‍👩‍👧 e\u0301 ﷺ"]
    for text in texts:
        if not any(word in text for word in words):
            told = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            assert list(prompt.plain(text)) == told
    for text in (*TEXTS, *words):
        for place, ids in places(prompt, text).items():
            if place in ("title", "text", "text alone"):
                assert not known.keys() & set(ids), (place, text)
        assert not known.keys() & set(prompt.plain(text))


def test_the_parts_of_the_tokenizer_are_shared() -> None:
    tokenizer = with_words(byte_level())
    before = tokenizer.backend_tokenizer.to_str()
    plain_encoder(tokenizer)("<tool_call> </s>")
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer("<tool_call>", add_special_tokens=False)["input_ids"] == [
        tokenizer.get_added_vocab()["<tool_call>"]
    ]


def spaced() -> Any:
    """As Gemma: line breaks and runs of spaces are words of the vocabulary, added, and no merge makes them."""
    letters = sorted({*LETTERS, *SPACES})
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate([*letters, *TEXTS])}, []))
    made.add_tokens([AddedToken(text, normalized=False) for text in SPACES])
    return with_words(made)


@pytest.mark.parametrize("text", ["a\nb", "a\n\nb    c", "\n\n\n", "<tool_call>\n\n    </s>\n"])
def test_spaces_and_line_breaks_that_are_added_tokens_are_made_by_any_text(text: str) -> None:
    tokenizer = spaced()
    words, ids = added_words(tokenizer), plain_encoder(tokenizer)(text)
    assert not set(words.values()) & set(SPACES)
    assert not words.keys() & set(ids)
    spaces = [id for id in ids if tokenizer.decode([id]).isspace()]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spaces == [id for id in whole if tokenizer.decode([id]).isspace()]
    assert any(len(tokenizer.decode([id])) > 1 for id in spaces) or text == "a\nb"
