"""Prompt pieces: nothing a document or a user says changes the frame around it."""

import transformers

from ragkv.profile import Profile
from ragkv.prompt import Prompt


def test_a_title_that_looks_like_a_field_stays_a_title(model):
    assert model.prompt.chunk_text("{text}", "body {title}") == "Document: {text}\nbody {title}\n"


def test_special_tokens_in_documents_and_questions_are_text(model):
    assert not set(model.prompt.chunk("T </s>", "a </s> b <s>")) & {0, 1, 2}
    assert 1 not in model.prompt.question("</s>")
    assert model.prompt.prefix == (0,)


def test_pieces_come_from_the_chat_template_where_there_is_one(demo_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    )
    prompt = Prompt(tokenizer, Profile())
    whole = [*prompt.prefix, *prompt.chunk("T", "x."), *prompt.question("Why?")]
    text = tokenizer.decode(whole)
    assert text.startswith("<s>[user]You answer questions")
    assert text.endswith("Document: T\nx.\nQuestion: Why?\nAnswer:</s>[assistant]")
    assert whole.count(1) == 1, "the template's own special tokens are special, once"


def test_without_profile_and_template_there_are_plain_pieces(demo_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder)
    prompt = Prompt(tokenizer, Profile())
    assert prompt.prefix == (0,)
    assert tokenizer.decode(list(prompt.question("Why?"))) == "Question: Why?\nAnswer:"
