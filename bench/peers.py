"""What a user would pick instead, written as a good PyTorch user would write it.

No masks, no short blocks: plain tensors of whole blocks, so that each peer does only what it must.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_balance(logits: Tensor, iterations: int, temperature: float) -> Tensor:
    x = logits / temperature
    x = x - x.logsumexp(-1, keepdim=True)
    for _ in range(iterations):
        x = x - x.logsumexp(-2, keepdim=True)
        x = x - x.logsumexp(-1, keepdim=True)
    return x.exp()


def eager_sinkhorn(query: Tensor, key: Tensor, value: Tensor, logits: Tensor, block: int,
                   iterations: int = 5, temperature: float = 0.75) -> Tensor:
    """Sort, concatenate, one softmax: the plain composition."""
    B, H, L, D = query.shape
    N = L // block
    sort = eager_balance(logits, iterations, temperature)
    q, k, v = (t.view(B, H, N, block, D) for t in (query, key, value))
    both = []
    for t in (k, v):
        moved = (sort @ t.reshape(B, H, N, block * D)).view(B, H, N, block, D)
        both.append(torch.cat([moved, t], 3))
    weights = torch.softmax(q @ both[0].transpose(-1, -2) * D**-0.5, -1)
    return (weights @ both[1]).view(B, H, L, D)


def block_local_sdpa(query: Tensor, key: Tensor, value: Tensor, block: int) -> Tensor:
    """Attention within blocks alone: nothing sorted, half the keys. A floor, not an equal."""
    B, H, L, D = query.shape
    q, k, v = (t.reshape(B * H, L // block, block, D) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).view(B, H, L, D)


def full_sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
