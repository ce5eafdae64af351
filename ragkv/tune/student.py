"""The loss: a model with an adapter learns to answer over stored KV as a teacher answers under full attention.

    distillation   KL(teacher under full attention || student under stored KV), at the tokens of answers
    answers        cross entropy of the given answers, student under full attention; without a teacher (`gold`),
                   under stored KV where the batch says so

No gold answers are needed for the first: an answer's text only says at which tokens the two are compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragkv.errors import ModelUnsupported
from ragkv.model.agreement import TOLERANCE, relative_error
from ragkv.model.own_forward import behind_body
from ragkv.model.supported import architecture_of
from ragkv.tune.adapters import Adapted
from ragkv.tune.attention import EagerAttention, RowAttention, RowWindows, SdpaAttention
from ragkv.tune.masks import RowBatch, full_mask, stored_mask, unwrapped
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import PREFIX

COMPILATIONS = 64
"""Most forms of a decoder layer that are compiled."""
CHECKED = 64
"""Tokens on which attention under a mask must agree with the model's own."""


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over rows of KL(teacher || student) of logits [n, vocabulary]; 0 without rows."""
    if not student.shape[0]:
        return student.sum()
    expected = F.log_softmax(teacher.float(), -1)
    return F.kl_div(F.log_softmax(student.float(), -1), expected, log_target=True, reduction="batchmean")


def answer_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [n, vocabulary] against token ids [n]; 0 without rows."""
    return F.cross_entropy(logits.float(), tokens) if tokens.shape[0] else logits.sum()


class Student(nn.Module):
    """A model with an adapter, as transformers' `Trainer` trains it: batches in, the loss out.

    Its state dict holds the adapter alone, so that a checkpoint is as small as the adapter.
    """

    def __init__(self, model: Adapted, options: TuneOptions):
        """Take a model with what is trained, and what it learns: `teacher`, `answers`, `distilled`.

        Raises:
            ModelUnsupported: rows of the model cannot be computed under a mask.
        """
        super().__init__()
        self.model, self._options = model, options
        self._windows = RowWindows.of(model.get_base_model().config)
        self._attention: RowAttention = SdpaAttention()
        self._attention = self._agreeing()
        # Behind the body a model may scale logits or cap them.
        self._logits_of = behind_body(model.get_base_model())
        self.attend_with(self._attention)

    @property
    def takes_sdpa(self) -> bool:
        """Whether rows may attend with SDPA, and so with flex attention."""
        return self._attention.implementation == SdpaAttention.implementation

    def _agreeing(self) -> RowAttention:
        """Return the attention that computes a plain text, under a mask, as the model itself does."""
        causal: Any = self.model.get_base_model()
        ids = torch.arange(CHECKED, device=causal.device)[None] % causal.config.vocab_size
        nothing = torch.zeros_like(ids)
        prefix, seen = nothing + PREFIX, torch.zeros(1, 1, 1, dtype=torch.bool)
        batch = RowBatch(ids, torch.arange(CHECKED, device=ids.device)[None], prefix, nothing, nothing, ids < 0, seen)
        with torch.no_grad():
            causal.set_attn_implementation("eager")
            expected = causal.model(input_ids=ids, use_cache=False).last_hidden_state[0]
            for attention in (SdpaAttention(), EagerAttention()):
                try:
                    self.attend_with(attention)
                except ValueError:  # transformers knows that the model has no such attention
                    continue
                if relative_error(self._hidden(batch, [full_mask(batch)])[0], expected) <= TOLERANCE[causal.dtype]:
                    return attention
        raise ModelUnsupported(f"{architecture_of(causal.config)} cannot be tuned: it takes no mask of our own")

    def attend_with(self, attention: RowAttention) -> None:
        """Change how rows attend."""
        self._attention = attention
        self.model.get_base_model().set_attn_implementation(attention.implementation)

    def compile_layers(self) -> None:
        """Compile the decoder layers. They share their code, so one compilation a shape of rows serves all of them."""
        causal = self.model.get_base_model()
        # A shape is compiled with gradients and without: more often than torch allows before it gives up compiling.
        torch._dynamo.config.recompile_limit = COMPILATIONS
        causal.enable_input_require_grads()  # else the first layer is compiled for itself
        for layer in causal.model.layers:
            layer.compile(dynamic=False)

    def forward(
        self,
        columns: Tensor,
        targets: Tensor,
        kept: Tensor,
        stored: Tensor,
    ) -> dict[str, Tensor]:
        """Return {"loss": …} and the parts of it.

        Args:
            columns: The first five columns of `RowBatch`, int64 [R, 5, T].
            targets: See `RowBatch`.
            kept: See `RowBatch`.
            stored: Whether this batch is also read under stored KV, bool []; for `gold`, under stored KV alone.
        """
        ids, positions, kinds, parts, blocks = columns.unbind(1)
        batch = RowBatch(ids, positions, kinds, parts, blocks, targets, kept)
        full, after = full_mask(batch), batch.ids.roll(-1, 1)[targets]
        if self._options.teacher == "base":
            return self._from_base(batch, full)
        if self._options.teacher == "gold":
            mask = stored_mask(batch) if bool(stored) else full
            gold = answer_loss(self._logits(batch, [mask])[0], after)
            return {"loss": gold, "answers": gold.detach()}
        masks = [full, stored_mask(batch)] if bool(stored) else [full]
        logits = self._logits(batch, masks)
        gold = answer_loss(logits[0], after)
        found = {"loss": self._options.answers * gold, "answers": gold.detach()}
        if len(masks) > 1:
            distilled = distillation_loss(logits[1], logits[0].detach())
            found |= {"loss": found["loss"] + self._options.distilled * distilled, "distillation": distilled.detach()}
        return found

    def _from_base(self, batch: RowBatch, full: Tensor) -> dict[str, Tensor]:
        """Learn both readings from the model without the adapter, so that full attention stays what it is."""
        as_before = unwrapped(batch)
        with torch.no_grad(), self.model.disable_adapter():
            teacher = self._logits(as_before, [full_mask(as_before)])[0]
        if self._options.kind == "wrapper":  # full attention has no wrapper tokens and stays what it is
            loss = distillation_loss(self._logits(batch, [stored_mask(batch)])[0], teacher)
            return {"loss": loss, "distillation": loss.detach()}
        asks = self._logits(batch, [full, stored_mask(batch)])
        same, distilled = (distillation_loss(each, teacher) for each in asks)
        return {"loss": same + distilled, "answers": same.detach(), "distillation": distilled.detach()}

    def _logits(self, batch: RowBatch, masks: list[Tensor]) -> list[Tensor]:
        """Return the logits [n, vocabulary] at the targets, under each mask, in one forward pass."""
        hidden = self._hidden(batch, masks)
        return [self._logits_of(each[batch.targets]) for each in hidden.chunk(len(masks))]

    def _hidden(self, batch: RowBatch, masks: list[Tensor]) -> Tensor:
        """Return what enters the head [masks · R, T, hidden]."""
        causal: Any = self.model.get_base_model()
        many = len(masks)
        dtype = torch.bfloat16 if batch.ids.is_cuda else causal.dtype
        mask = self._windows.prepare(self._attention, batch, masks, dtype)
        hidden: Tensor = causal.model(
            input_ids=batch.ids.repeat(many, 1),
            position_ids=batch.positions.repeat(many, 1),
            attention_mask=mask,
            use_cache=False,
        ).last_hidden_state
        return hidden

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # two overloads
        """Return the trained tensors."""
        return {name: value.detach() for name, value in self.named_parameters() if value.requires_grad}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned. The base model's own tensors are not missing."""
        names = set(self.state_dict())
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        found.missing_keys[:] = [name for name in found.missing_keys if name in names]
        return found
