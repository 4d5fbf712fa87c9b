"""Sparse Sinkhorn Attention: the operators, exact and fast, for PyTorch.

    pooled = sinkhorn.pool(x, block=64)
    sort = sinkhorn.balance(logits, iterations=5, temperature=0.75)
    out = sinkhorn.attention(query, key, value, sort, block=64)

All are differentiable, run on CPU and CUDA tensors, and work under torch.compile and torch.export.
They wrap ``torch.ops.sinkhorn.*``, which importing this package loads from ``libsinkhorn.so``.

    model = sinkhorn.load_model("exported")  # what `sinkhorn export RUN exported` wrote
    logits = model(ids)
"""

from sinkhorn._library import library_path
from sinkhorn.export import Export, load_export
from sinkhorn.models import load_model
from sinkhorn.ops import attention, balance, cpu_form, pool, sortcut

__all__ = ["Export", "attention", "balance", "cpu_form", "library_path", "load_export", "load_model",
           "pool", "sortcut"]
__version__ = "0.1.0"
