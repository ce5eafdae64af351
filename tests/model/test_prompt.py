"""Prompt pieces: text of a document or a user never changes the frame around it."""

import threading

import pytest
import transformers
from tokenizers import AddedToken

from ragkv.errors import InputError
from ragkv.model.profile import Profile
from ragkv.model.prompt import SYSTEM, Prompt


def test_a_title_that_looks_like_a_field_stays_a_title(model):
    assert model.prompt.chunk_text("{text}", "body {title}") == "Document: {text}\nbody {title}\n"


def test_special_tokens_in_documents_and_questions_are_text(model):
    assert not set(model.prompt.chunk("T </s>", "a </s> b <s>")) & {0, 1, 2}
    assert 1 not in model.prompt.question("</s>")
    assert model.prompt.prefix == (0,)


def test_pieces_come_from_the_chat_template_where_there_is_one(tiny_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    )
    prompt = Prompt(tokenizer, Profile())
    whole = [*prompt.prefix, *prompt.chunk("T", "x."), *prompt.question("Why?")]
    text = tokenizer.decode(whole)
    assert text.startswith("<s>[user]You answer questions")
    assert text.endswith("Document: T\nx.\nQuestion: Why?\nAnswer:</s>[assistant]")
    assert whole.count(1) == 1, "the template's own special tokens are special, once"


def test_without_profile_and_template_there_are_plain_pieces(tiny_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    prompt = Prompt(tokenizer, Profile())
    assert prompt.prefix == (0,)
    assert tokenizer.decode(list(prompt.question("Why?"))) == "Question: Why?\nAnswer:"


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [QWEN, BRACKETS])
def test_two_turns_in_pieces_are_what_the_template_writes_for_the_whole_conversation(tiny_folder, template):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = template
    prompt = Prompt(tokenizer, Profile())
    kept, then = prompt.answered(prompt.plain("A lamp."), "A lamp.")
    first = [*prompt.prefix, *prompt.chunk("T", "x."), *prompt.question("Why?")]
    pieces = [*first, *kept, *then, *prompt.chunk("U", "y."), *prompt.question("And?")]
    before = tokenizer.decode(list(prompt.prefix)).partition("You answer")[2]
    user = f"You answer{before}Document: T\nx.\nQuestion: Why?\nAnswer:"
    turns = [("user", user), ("assistant", "A lamp."), ("user", "Document: U\ny.\nQuestion: And?\nAnswer:")]
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = whole.replace("[/INST] A lamp.", "[/INST]A lamp.")  # the model generates that space itself, if any
    assert tokenizer.decode(pieces) == expected


@pytest.mark.parametrize("template", [QWEN, BRACKETS])
def test_history_is_what_the_template_writes_for_earlier_messages(tiny_folder, template):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = template
    prompt = Prompt(tokenizer, Profile())
    tokens = [
        *prompt.prefix,
        *prompt.chunk("T", "x."),
        *prompt.question("Since when?", [("Why?", "Rain.")], "Be brief."),
    ]
    first = f"{SYSTEM}\n\n{prompt.chunk_text('T', 'x.')}Be brief.\n{prompt.question_text('Why?')}"
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": prompt.question_text("Since when?")},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    squeezed = [" ".join(text.split()) for text in (tokenizer.decode(tokens), expected)]
    assert squeezed[0] == squeezed[1]
    assert prompt.question("Why?", (), "") == prompt.question("Why?")


def test_a_template_without_a_second_turn_is_refused_when_one_is_needed(tiny_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}[{{ messages[0].content }}]"
    )
    prompt = Prompt(tokenizer, Profile())
    assert tokenizer.decode(list(prompt.question("Why?"))).endswith("Answer:]")
    with pytest.raises(InputError, match="one turn only"):
        prompt.answered((), "x")


def test_an_answer_keeps_the_models_tokens_up_to_the_cut(model):
    prompt, decode = model.prompt, model.tokenizer.decode
    tokens = prompt.plain(" Ada Brook\nQuestion: more")
    end = len(prompt.plain(" Ada Brook"))
    assert prompt.answered(tokens, " Ada Brook") == (tokens[:end], prompt.plain("\n"))
    assert prompt.answered(tokens, decode(tokens)) == (tokens, prompt.plain("\n"))
    assert prompt.answered((), "") == ((), prompt.plain("\n"))
    assert prompt.retold("Ada Brook") == (*tokens[:end], *prompt.plain("\n"))


def test_a_cut_inside_a_token_keeps_the_text_before_it(model):
    prompt, decode = model.prompt, model.tokenizer.decode
    tokens = prompt.plain(" lighthouses é")
    whole = decode(tokens)
    for end in range(len(whole) + 1):
        kept, then = prompt.answered(tokens, whole[:end])
        assert decode([*kept, *then]) == whole[:end] + "\n"
        assert kept == tokens[: len(kept)]


@pytest.mark.parametrize(
    "text", ["Ada Brook.", "naïve 日本語 😀 ünïcode " * 5, "\ufffd half \ufffd", "</s> {text} \n\n", "👩‍👩‍👧‍👦" * 9]
)
@pytest.mark.parametrize("block", [1, 2, 3, 16, 1000])
def test_block_texts_join_to_the_chunk_without_split_characters(model, text, block):
    tokens = model.prompt.chunk("Tarn", text)
    texts = model.prompt.blocks(tokens, block)
    whole = model.prompt.chunk_text("Tarn", text)
    assert len(texts) == -(-len(tokens) // block)
    assert "".join(texts) == whole
    assert sum(each.count("\ufffd") for each in texts) == whole.count("\ufffd")


def test_block_texts_are_stable_while_another_thread_uses_the_tokenizer(model):
    tokens, faults, done = model.prompt.chunk("Tarn", "日本語 and more " * 50), [], threading.Event()

    def toggle():
        special = False
        while not done.is_set():  # every other call changes a setting of the tokenizer
            special = not special
            try:
                model.tokenizer("a </s> b", add_special_tokens=False, split_special_tokens=special)
            except Exception as error:
                faults.append(error)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        assert len({tuple(model.prompt.blocks(tokens, 8)) for _ in range(20)}) == 1
    finally:
        done.set()
        thread.join()
    assert not faults


CHAT = Profile(
    prefix="<|im_start|>user\n",
    chunk="<|im_start|>Document: {title}\n{text}<|im_end|>\n",
    question="Question: {question}<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture
def chat(tiny_folder):
    """The tiny tokenizer with two control tokens more, and their ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer, *tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


def test_control_tokens_that_a_profile_writes_are_tokens_in_every_piece(chat):
    tokenizer, start, end = chat
    prompt = Prompt(tokenizer, CHAT)
    chunk, question = prompt.chunk("T", "x."), prompt.question("Why?")
    assert prompt.prefix[0] == start
    assert (chunk[0], chunk.count(start), chunk.count(end)) == (start, 1, 1)
    assert (question.count(start), question.count(end)) == (1, 1)
    assert tokenizer.decode(chunk) == prompt.chunk_text("T", "x.") == "<|im_start|>Document: T\nx.<|im_end|>\n"
    assert tokenizer.decode(question) == "Question: Why?<|im_end|>\n<|im_start|>assistant\n"
    frame = tokenizer("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert question == (*prompt.plain("Question: Why?"), *frame)


@pytest.mark.parametrize("word", ["<|im_start|>", "<|im_end|>", "</s>", "{text}<|im_end|>", "{question}"])
def test_what_is_filled_into_a_piece_with_control_tokens_is_plain_text(chat, word):
    tokenizer, start, end = chat
    prompt = Prompt(tokenizer, CHAT)
    chunk, question = prompt.chunk(f"a{word}", f"{word} b {word}"), prompt.question(f"{word}?")
    assert (chunk.count(start), chunk.count(end), chunk.count(1)) == (1, 1, 0)
    assert (question.count(start), question.count(end), question.count(1)) == (1, 1, 0)
    assert tokenizer.decode(chunk) == prompt.chunk_text(f"a{word}", f"{word} b {word}")


def test_a_piece_without_control_tokens_makes_the_tokens_of_its_filled_text(model):
    prompt = model.prompt
    assert prompt.chunk("The lamp", "A lamp burns. ") == prompt.plain("Document: The lamp\nA lamp burns. \n")


def test_spaces_that_a_control_token_takes_with_it_are_dropped_as_the_tokenizer_does(tiny_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True, special=True), AddedToken("<|end|>", lstrip=True)])
    prompt = Prompt(tokenizer, Profile(question="<|user|>\n {question} \n<|end|>"))
    expected = tokenizer("<|user|>\n Why? \n<|end|>", add_special_tokens=False)["input_ids"]
    assert prompt.question("Why?") == tuple(expected)
    assert tokenizer.decode(expected[1:-1]) == "Why?"


def test_behind_a_question_piece_with_control_tokens_the_chat_template_ends_the_turn(chat):
    tokenizer = chat[0]
    tokenizer.chat_template = QWEN
    assert tokenizer.decode(Prompt(tokenizer, CHAT).between) == "<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(Prompt(tokenizer, Profile(question="Q: {question}\nA:")).between) == "\n"
