"""Decode steps: one forward, or one recorded graph, for the latest tokens of several sequences.

`generate` decodes one sequence alone. First passes of other requests may run in the forward of a step (`PrefillGroup`).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.logits import StepLogits
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import WIDEST, GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass


@dataclass
class PrefillGroup:
    """Passes of other requests that may run in the forward of a decode step, so that both read the weights once.

    Attributes:
        passes: The passes.
        alone: Whether they run in no forward of others: one that they were in has failed.
        logits: Of each pass; None where they did not run beside the step.
        fault: What the forward of both raised. The passes must not run again: they may have run in part.
    """

    passes: abc.Sequence[Pass]
    alone: bool = False
    logits: list[Tensor] | None = None
    fault: Exception | None = None

    @property
    def rows(self) -> int:
        """Rows of all passes."""
        return sum(len(each.tokens) for each in self.passes)

    @property
    def joins(self) -> bool:
        """Whether there are passes that may run beside others."""
        return bool(self.passes) and not self.alone


def decode_step(
    model: DecoderModel,
    sequences: abc.Sequence[Sequence],
    graph_decoder: GraphDecoder | None = None,
    group: PrefillGroup | None = None,
) -> None:
    """Run the latest token of every sequence, and what was drafted behind it, in one forward.

    The group runs in it, too, unless the step is a recorded graph. A graph is quicker than a forward with a group
    (docs/lab-notes.md). It joins dense sequences only: they can be decoded again where the forward fails, and a
    policy that has seen half of a pass cannot.

    A recorded step of greedy sequences is followed by the next one before anybody has read its tokens, unless a group
    waits for the device or a draft may come (`GraphDecoder.decode_ahead`). Sequences that it lacks wait for the step
    behind it: they are not `ready` afterwards.

    Args:
        model: The model.
        sequences: Each has its own cache, attention, drafts and faults.
        graph_decoder: Decodes the dense sequences by a recorded graph; None runs them in the forward.
        group: Passes of other requests.
    """
    pooled = [each for each in sequences if each.pooled is not None]
    sequences = [each for each in sequences if each.pooled is None]
    if pooled:
        _decode_pooled(pooled)
    dense = [sequence for sequence in sequences if sequence.attention is None]
    if graph_decoder is not None:
        sequences = [sequence for sequence in sequences if sequence.attention is not None]
        idle = not pooled and not sequences and (group is None or not group.passes)
        _decode_recorded(graph_decoder, dense, idle)
    else:
        for sequence in dense:
            sequence.make_draft()
        if dense and group is not None and group.joins and _decode_beside(model, dense, group):
            sequences = [sequence for sequence in sequences if sequence.attention is not None]
    if sequences:
        _accept(sequences, model.forward([each.next_pass() for each in sequences]))


def _decode_beside(model: DecoderModel, sequences: abc.Sequence[Sequence], group: PrefillGroup) -> bool:
    """Decode sequences and run a group in one forward. Where it fails, the sequences are left as they were.

    Returns:
        Whether the sequences were decoded.
    """
    lengths = [list(each.cache.lengths) for each in sequences]
    passes = [each.next_pass() for each in sequences]
    try:
        logits = model.forward([*passes, *group.passes])
    except Exception as fault:
        group.fault = fault
        for sequence, before in zip(sequences, lengths, strict=True):
            sequence.cache.truncate(before)
        return False
    group.logits = logits[len(passes) :]
    _accept(sequences, logits[: len(passes)])
    return True


def _accept(sequences: abc.Sequence[Sequence], logits: abc.Sequence[Tensor]) -> None:
    """Give every sequence the logits [O, vocabulary] of its pass."""
    for sequence, rows in zip(sequences, logits, strict=True):
        sequence.accept(StepLogits(rows if sequence.draft else rows[-1:]).rows())


def _decode_recorded(graph_decoder: GraphDecoder, sequences: abc.Sequence[Sequence], idle: bool) -> None:
    """Run a recorded step, or take the one that was launched ahead, and launch the next where that is of use.

    Args:
        graph_decoder: Decodes.
        sequences: The dense sequences.
        idle: Whether nothing else waits for the device.
    """
    launched = [sequence for sequence in sequences if graph_decoder.is_ahead(sequence.cache)]
    if not launched:
        # Drafts share the rows of a recorded graph that the latest tokens leave: with more, weights are read twice.
        most = WIDEST // len(sequences) - 1 if sequences else None
        for sequence in sequences:
            sequence.make_draft(most)
    logits = _decode_rows(graph_decoder, launched or sequences)
    continues = any(len(sequence.tokens) + 1 < sequence.sampling.max_tokens for sequence in sequences)
    complete = len(launched) in (0, len(sequences))  # otherwise those that are left out come next
    if idle and continues and complete and all(sequence.runs_ahead for sequence in sequences):
        graph_decoder.decode_ahead(logits.likeliest, lambda: logits.best)


def _decode_rows(graph_decoder: GraphDecoder, sequences: abc.Sequence[Sequence]) -> StepLogits:
    """Run one recorded step for all of them; return its logits. Drafted tokens are further rows."""
    rows = [[sequence.tokens[-1], *sequence.draft] for sequence in sequences]
    numbered = [(sequence, i) for sequence, mine in zip(sequences, rows, strict=True) for i in range(len(mine))]
    caches = [sequence.cache for sequence, _ in numbered]
    positions = [sequence.position + i for sequence, i in numbered]
    paged = [sequence.paged for sequence, _ in numbered]
    logits = StepLogits(graph_decoder.decode(caches, [token for mine in rows for token in mine], positions, paged))
    logits.fetch()
    for sequence, rows_of in zip(sequences, logits.split([len(mine) for mine in rows]), strict=True):
        sequence.accept(rows_of)
    return logits


def _decode_pooled(sequences: abc.Sequence[Sequence]) -> None:
    """Run one step over the pool for all of them."""
    requests = [each.pooled for each in sequences if each.pooled is not None]
    latest, positions = [each.tokens[-1] for each in sequences], [each.position for each in sequences]
    logits = requests[0].decoder.decode(requests, latest, positions)
    for sequence, row in zip(sequences, StepLogits(logits).rows(), strict=True):
        sequence.accept([row])


def generate(model: DecoderModel, sequence: Sequence, graph_decoder: GraphDecoder | None = None) -> Iterator[int]:
    """Yield the token ids of one sequence, decoded alone.

    A token is yielded before its pass runs, unless it was drafted; the pass of the last token never runs.

    Args:
        model: The model.
        sequence: What to decode.
        graph_decoder: As in `decode_step`.
    """
    if sequence.pooled is not None:
        sequence.pooled.join()
    try:
        while (token := sequence.sample(model.stop_ids)) is not None:
            yield token
            if not sequence.finished and not sequence.ready:
                decode_step(model, [sequence], graph_decoder)
            if sequence.fault is not None:
                raise sequence.fault
    finally:
        sequence.close()


def decode(
    model: DecoderModel,
    cache: ContextCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    attention: Attention | None = None,
) -> Iterator[int]:
    """Yield token ids: the first from `logits` [vocabulary], each next one from a pass of one row.

    Ends at a stop token, which is not yielded, or after max_tokens. See `Sequence` for the arguments.
    """
    return generate(model, Sequence(cache, logits, position, sampling, attention))
