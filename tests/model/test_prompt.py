"""Prompt pieces: text of a document or a user never changes the frame around it."""

import threading

import pytest
import transformers

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
