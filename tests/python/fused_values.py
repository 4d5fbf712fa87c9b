"""What the checks of the training step's operators compare, and how."""

from __future__ import annotations

import torch
from torch import Tensor

from support import randn, rms, rms_error

Values = dict[str, Tensor]


def compare(found: Values, eager: Values, truth: Values, why: str) -> None:
    """At most 2x eager's error, 3x for gradients; the floor is half an ulp, where eager is lucky."""
    for name, exact in truth.items():
        assert found[name].dtype == eager[name].dtype, (why, name, found[name].dtype)
        floor = torch.finfo(found[name].dtype).eps / 2 * rms(exact)
        ratio = 3 if name.startswith("gradient") else 2
        error, allowed = rms_error(found[name], exact), rms_error(eager[name], exact)
        assert error <= ratio * allowed + floor + 1e-12, f"{why}: {name}: {error:.3g} > {allowed:.3g}"


def gradients(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Values:
    """Of a weighted sum of the outputs."""
    weights = [randn(*y.shape, seed=900 + i, device=y.device, dtype=y.dtype)
               for i, y in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, list(inputs.values()), weights)
    return {f"gradient of {name}": g for name, g in zip(inputs, grads)}


def leaves(tensors: Values, dtype: torch.dtype | None = None) -> Values:
    return {k: x.detach().to(dtype or x.dtype).requires_grad_() for k, x in tensors.items()}
