"""How sparse the attention of a model is: the measurement behind the table in `benchmarks/shapes.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.model.rotary import rotate


@torch.inference_mode()
def key_share(model: DecoderModel, tokens: list[int], mass: float = 0.95, rows: int = 64) -> Tensor:
    """Smallest share of a row's keys that holds `mass` of its attention.

    Args:
        rows: the last rows of the input, which are measured.

    Returns:
        Medians over these rows, [L, Hq].
    """
    cache = ContextCache(model.shape, len(tokens), model.dtype, model.devices)
    capture = Capture()
    model.forward([append(cache, tokens, 0, outputs=0, capture=capture)])
    asked = torch.arange(len(tokens) - rows, len(tokens))
    seen = torch.arange(len(tokens) - rows + 1, len(tokens) + 1, device=model.device)
    shares = []
    for layer, q in enumerate(capture.q):
        k = cache.k(layer).float().repeat_interleave(model.shape.q_heads // model.shape.kv_heads, dim=1)
        turned = rotate(q[-rows:], model.rotary(asked, layer)).float()
        scores = torch.einsum("thd,nhd->htn", turned, k) * model.kinds[layer].scale
        hidden = torch.arange(len(tokens), device=model.device) >= seen[:, None]
        best = scores.masked_fill(hidden, float("-inf")).softmax(-1).sort(descending=True).values
        needed = (best.cumsum(-1) < mass).sum(-1) + 1
        shares.append((needed / seen).median(-1).values)
    return torch.stack(shares).cpu()
