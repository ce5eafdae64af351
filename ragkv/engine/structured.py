"""Answers that follow a JSON schema.

llguidance (github.com/guidance-ai/llguidance, MIT) turns a schema into a grammar over the model's tokens and says which
token may come next. A token is chosen among those, so every answer that ends is valid. What the grammar leaves no
choice about, such as the name of the next field, is drafted (drafting.py): a pass verifies all of it.

JSON has no blanks between its tokens here: a small model that may write blanks writes many.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ragkv.engine.logits import RowLogits
    from ragkv.model.decoder import DecoderModel
    from ragkv.types import AskOptions

Schema = Mapping[str, Any]

SCHEMA_CHARACTERS = 32_768
"""Longest schema as JSON. Longer ones take seconds to be understood."""
MOST_PATTERNS = 8
"""Patterns that one string may have to match. Sixteen take seconds to be understood, twenty half a minute."""
KEPT_GRAMMARS = 32
STRUCTURED_TOKENS = 256
"""Longest answer that follows a schema, in tokens, where neither the question nor the settings allow more."""
CLOSING_TOKENS = 48
"""Tokens before the longest length from which on an answer is brought to its end."""
IN_STRING = 512
"""Where more tokens than this may come next, the answer is inside a string: there `}` is a letter like others."""
ENDS = ("}", "]", '"', ",")
"""What ends a value between strings, in the order in which it is tried near the longest length."""


class Guide:
    """Which tokens may come next in one answer. State of one request."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], most: int):
        """Start before the first token.

        Args:
            matcher: The grammar and how far it is; it understands the model's stop tokens.
            ends: Token ids of ENDS.
            most: Longest answer, in tokens.
        """
        self._matcher, self._ends, self._left = matcher, ends, most
        self._closing = min(CLOSING_TOKENS, most // 2)

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        """Take the token that was chosen.

        Raises:
            InputError: The schema allows so much at this place that it is not followed any further.
        """
        self._matcher.consume_token(token)
        self._left -= 1
        if self._matcher.is_error():
            raise _not_understood(self._matcher)

    def forced(self, most: int) -> tuple[int, ...]:
        """Return the tokens that must follow, at most `most`."""
        return tuple(self._matcher.compute_ff_tokens()[:most]) if most > 0 and not self.complete else ()

    def allows(self, row: RowLogits) -> bool:
        """Whether the most likely token may come next, so that no mask is needed."""
        return self._left > self._closing and self._matcher.validate_tokens([row.best]) == 1

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [vocabulary] on the CPU with -inf for every token that may not come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()[: logits.shape[0]]
        if allowed.shape[0] < logits.shape[0]:  # rows of the head that are no tokens
            allowed = torch.cat([allowed, allowed.new_zeros(logits.shape[0] - allowed.shape[0])])
        if self._left <= self._closing and (end := self._end(allowed)) is not None:
            allowed = torch.zeros_like(allowed)
            allowed[end] = True
        return logits.masked_fill(~allowed, -torch.inf)

    def _end(self, allowed: Tensor) -> int | None:
        """Return the token that brings the answer nearer to its end; None where the model may choose."""
        inside = int(allowed.sum()) > IN_STRING
        ends = (self._ends[ENDS.index('"')],) if inside else self._ends
        return next((token for token in ends if allowed[token]), None)


class GrammarDrafter:
    """Drafts what the grammar forces, in place of what the prompt suggests. State of one sequence.

    Attributes:
        passes: As of `Drafter`, like the next two.
        drafted: Tokens of all drafts.
        accepted: Those that became tokens of the answer: all that are verified.
    """

    def __init__(self, guide: Guide):
        """Take the guide of the sequence."""
        self.passes = self.drafted = self.accepted = 0
        self._guide = guide

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return the tokens that must follow, at most `limit`."""
        draft = self._guide.forced(limit)
        self.passes += bool(draft)
        self.drafted += len(draft)
        return draft

    def accept(self) -> None:
        """Note that the next token of the latest draft was accepted."""
        self.accepted += 1


class Grammars:
    """Grammars of the schemas that were asked for lately, over the tokens of one model. Not thread-safe."""

    def __init__(self, model: DecoderModel):
        """Prepare nothing: the tokenizer takes a part of a second, and most services need no schema."""
        self._model = model
        self._known = OrderedDict[str, "LLMatcher"]()
        self._ends: tuple[int, ...] = ()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The model's tokens, their bytes and its stop tokens.

        Raises:
            InputError: The tokenizer is of a kind that llguidance does not read.
        """
        from llguidance.hf import from_tokenizer

        stops = sorted(self._model.stop_ids) or None
        try:
            return from_tokenizer(self._model.tokenizer, eos_token=stops)
        except ValueError as error:
            told = f"{self._model.name} can neither follow a schema nor name its tokens: {error}"
            raise InputError(told) from None

    def limits(self, options: AskOptions, most: int) -> tuple[int, tuple[str, ...]]:
        """Check a question that asks for a structured answer; return the longest answer, and what ends it.

        Args:
            options: How it is asked.
            most: Longest answer of the settings, in tokens.

        Raises:
            InputError: The schema is too long or not understood, or something is asked for that does not go with one.
        """
        if options.abstain_below is not None:
            raise InputError("an answer that follows a schema has no confidence; leave out `abstain_below`")
        if options.beginning:
            raise InputError("an answer that follows a schema begins with nothing else")
        self.guide(options.answer_schema, 1)
        # A profile's ends are those of an answer in words.
        return options.max_tokens or max(most, STRUCTURED_TOKENS), tuple(options.stop)

    def guide(self, schema: Schema | None, most: int) -> Guide | None:
        """Return a guide for one answer; None where it follows no schema.

        Args:
            schema: The JSON schema, if there is one.
            most: Longest answer, in tokens.

        Raises:
            InputError: The schema is too long, or is not understood.
        """
        if schema is None:
            return None
        try:
            text, patterns = json.dumps(schema, ensure_ascii=False), _Patterns(schema).most()
        except RecursionError:
            raise InputError("the schema is nested too deeply") from None
        if len(text) > SCHEMA_CHARACTERS:
            raise InputError(f"the schema has {len(text)} characters, the limit is {SCHEMA_CHARACTERS}")
        if patterns > MOST_PATTERNS:
            raise InputError(f"the schema has a string with {patterns} patterns, the limit is {MOST_PATTERNS}")
        if text not in self._known:
            self._known[text] = self._compiled(text)
        self._known.move_to_end(text)
        while len(self._known) > KEPT_GRAMMARS:
            self._known.popitem(last=False)
        return Guide(self._known[text].deep_copy(), self._ends, most)

    def _compiled(self, schema: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self.tokenizer
        self._ends = self._ends or tuple(tokenizer.greedy_tokenize(end)[0] for end in ENDS)
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except ValueError as error:
            raise InputError(f"the schema is not understood: {error}") from None
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _not_understood(matcher)
        return matcher


def _not_understood(matcher: LLMatcher) -> InputError:
    return InputError(f"the schema is not understood: {' '.join(matcher.get_error().split())[:300]}")


class _Patterns:
    """How many patterns one string has to match. Finding out whether any string does takes time exponential in that."""

    def __init__(self, root: Schema):
        self._root, self._known = root, dict[int, int]()

    def most(self) -> int:
        """Return the most, over all places of the schema."""
        found, nodes = 0, list[Any]([self._root])
        while nodes:
            node = nodes.pop()
            nodes += node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
            found = max(found, self._count(node))
        return found

    def _count(self, node: object) -> int:
        if not isinstance(node, Mapping):
            return 0
        if id(node) not in self._known:
            self._known[id(node)] = 0  # a reference that leads back adds nothing
            parts = [self._count(part) for part in _parts(node, "allOf")]
            choices = [max(map(self._count, _parts(node, name)), default=0) for name in ("anyOf", "oneOf")]
            own = ("pattern" in node) + ("format" in node)
            self._known[id(node)] = own + sum(parts) + sum(choices) + self._count(self._target(node.get("$ref")))
        return self._known[id(node)]

    def _target(self, reference: object) -> object:
        """Return what a reference inside the schema leads to; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node: object = self._root
        for name in reference[1:].split("/")[1:]:
            node = node.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return node


def _parts(node: Schema, name: str) -> Sequence[object]:
    parts = node.get(name)
    return parts if isinstance(parts, list) else ()


def values_of(answer: str) -> str:
    """Return the values of a JSON answer as text, in order: what passages can hold. An answer that is cut is returned.

    Args:
        answer: JSON.
    """
    try:
        return " ".join(_values(json.loads(answer)))
    except ValueError:
        return answer


def _values(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for field in value.values():
            yield from _values(field)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
