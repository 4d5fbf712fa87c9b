"""The program's models in Python, for use (not for training): built from an export, they compute what
the program computes. Their state_dict has the program's names; parameters keep the types they were
exported in; products run in the export's type, norms and sums in float32.
"""

from __future__ import annotations

import math
import os
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkhorn import ops
from sinkhorn.export import Export, load_export

_COMPUTE = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
            "float64": torch.float64}
_BEGIN = 1


def load_model(folder: Union[str, os.PathLike[str], Export], verify: bool = True) -> "Model":
    """The model of an exported folder, in evaluation mode. On the CPU its parameters are the mapped
    file itself. ``verify``: see ``load_export``. Raises ValueError with the file's name where the two
    files do not fit together."""
    export = folder if isinstance(folder, Export) else load_export(folder, verify)
    kinds = {"language_model": LanguageModel, "seq2seq": Seq2Seq, "classifier": Classifier}
    try:
        with torch.device("meta"):
            model = kinds[export.config["info"]["model"]](export.config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{export.folder / 'config.json'}: {error} is missing or unknown") from None
    try:
        model.load_state_dict(export.state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{export.folder / 'model.safetensors'}: {error}") from None
    return model.eval().requires_grad_(False)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.Module):
    def __init__(self, width: int, compute: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-6)
        return x.to(self.compute)


class Embedding(nn.Module):
    """Token vectors times sqrt(d) plus sinusoidal positions, in float32."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, ids: Tensor) -> Tensor:
        width = self.weight.shape[1]
        half = width // 2
        place = torch.arange(ids.shape[1], dtype=torch.float64, device=ids.device)
        rate = torch.arange(half, dtype=torch.float64, device=ids.device)
        angles = place[:, None] * torch.exp(-math.log(10000) / max(half - 1, 1) * rate)
        table = F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, width % 2)).float()
        return torch.add(table, F.embedding(ids, self.weight), alpha=math.sqrt(width))

    def tied_output(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class FeedForward(nn.Module):
    """``into`` is called "in" in files, which generated code (torch.compile, torch.fx) cannot say."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.into = Linear(width, inner, bias=True)
        self.out = Linear(inner, width, bias=True)
        self.register_load_state_dict_pre_hook(_from_names_of_files)
        self.register_state_dict_post_hook(_to_names_of_files)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu())


def _from_names_of_files(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _rename(state, f"{prefix}in.", f"{prefix}into.")


def _to_names_of_files(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    _rename(state, f"{prefix}into.", f"{prefix}in.")


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old):]] = state.pop(name)


class SortNet(nn.Module):
    """x [B, L, E] -> logits [B, H, N, N]."""

    def __init__(self, attention: dict[str, Any], width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.attention, self.heads, self.decoder = attention, heads, decoder
        kind, columns = attention["sort_net"], heads * attention["max_blocks"]
        if kind == "bilinear":
            self.destination, self.source = Linear(width, width), Linear(width, width)
        else:
            deep = kind.startswith("mlp")
            self.first = Linear(width, width if deep else columns, bias=True)
            self.second = Linear(width, columns, bias=True) if deep else None

    def forward(self, x: Tensor, mask: Optional[Tensor]) -> Tensor:
        a = self.attention
        pooled = ops.pool(x, a["block"], a["pooling"], self.decoder, mask).to(_wide(x.dtype))
        if a["sort_net"] == "bilinear":
            sources = pooled
            if self.decoder and a["causal"] == "strict":
                mode = "sum" if a["pooling"] == "sum" else "mean"
                sources = ops.pool(x, a["block"], mode, False, mask).to(pooled.dtype)
            d = _split(self.destination(pooled), self.heads)
            s = _split(self.source(sources), self.heads)
            return d @ s.transpose(2, 3) / math.sqrt(d.shape[3])
        y = self.first(pooled)
        if self.second is not None:
            y = self.second(y.relu())
        if a["sort_net"].endswith("_relu"):
            y = y.relu()
        blocks = pooled.shape[1]
        return y.unflatten(2, (self.heads, a["max_blocks"]))[..., :blocks].transpose(1, 2)


class SinkhornAttention(nn.Module):
    """Self-attention of every kind, [B, L, E] -> [B, L, E]."""

    def __init__(self, attention: dict[str, Any], width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.attention, self.heads, self.decoder = attention, heads, decoder
        self.qkv = Linear(width, (2 if attention["tie_kv"] else 3) * width)
        self.out = Linear(width, width)
        if attention["kind"] in ("sinkhorn", "mixture", "sortcut"):
            self.sort_net = SortNet(attention, width, heads, decoder)

    @property
    def causal(self) -> str:
        return self.attention["causal"] if self.decoder else "none"

    def sort(self, x: Tensor, mask: Optional[Tensor]) -> Tensor:
        """The relaxed permutation [B, H, N, N] of x."""
        a = self.attention
        live = None
        if mask is not None:
            live = ops.pool(mask[..., None].float(), a["block"], "sum").squeeze(2) > 0
        window = a["window"] if self.causal == "strict" else 0
        return ops.balance(self.sort_net(x, mask), a["iterations"], a["temperature"], self.causal,
                           a["columns"], window, None, live)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        if mask is not None:
            x = torch.where(mask[..., None], x, 0)
        parts = self.qkv(x).split(x.shape[2], 2)
        heads = [_split(parts[i], self.heads) for i in (0, 1, -1)]
        return self.out(_join(self._attend(x, heads, mask)))

    def _attend(self, x: Tensor, heads: list[Tensor], mask: Optional[Tensor]) -> Tensor:
        a, kind = self.attention, self.attention["kind"]
        if kind == "full":
            return _dense(*heads, mask, _causal_mask(x) if self.decoder else None)
        if kind == "sparse":
            return self._sparse(x, heads, mask)
        if kind == "sortcut":
            sort = self.sort(x, mask)
            return ops.sortcut(*heads, sort, a["block"], min(a["budget"], sort.shape[2]), mask)
        window = {"local": 0, "window": max(1, a["window"])}.get(kind, a["window"])
        sort = self.sort(x, mask) if kind in ("sinkhorn", "mixture") else None
        y = ops.attention(*heads, sort, a["block"], self.causal, a["combine"], window, mask)
        if kind == "mixture":
            y = y + _dense(*heads, mask, _causal_mask(x) if self.decoder else None)
        return y

    def _sparse(self, x: Tensor, heads: list[Tensor], mask: Optional[Tensor]) -> Tensor:
        a, token = self.attention, torch.arange(x.shape[1], device=x.device)
        seen = (token % a["stride"] >= a["stride"] - a["summary"]).expand(x.shape[1], -1)
        if a["merged"]:  # every head sees both
            seen = seen | (token[:, None] // a["stride"] == token // a["stride"])
        if self.decoder:
            seen = seen & _causal_mask(x)
        if a["merged"]:
            return _dense(*heads, mask, seen)
        near = (self.heads + 1) // 2  # see their own stride block, the others the summaries
        own = ops.attention(*(t[:, :near] for t in heads), None, a["stride"],
                            "strict" if self.decoder else "none", mask=mask)
        if near == self.heads:
            return own
        far = [t[:, near:] for t in heads]
        return torch.cat([own, _dense(*far, mask, seen)], 1)


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = Linear(width, width), Linear(width, 2 * width)
        self.out = Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Optional[Tensor]) -> Tensor:
        key, value = self.key_value(memory).split(x.shape[2], 2)
        heads = [_split(t, self.heads) for t in (self.query(x), key, value)]
        return self.out(_join(_dense(*heads, mask, None)))


class TransformerLayer(nn.Module):
    def __init__(self, config: dict[str, Any], decoder: bool, cross: bool) -> None:
        super().__init__()
        m, compute = config["model"], _compute(config)
        width, heads = m["width"], m["heads"]
        self.attention_norm = LayerNorm(width, compute)
        attention = config["decoder" if decoder else "encoder"]
        self.attention = SinkhornAttention(attention, width, heads, decoder)
        if cross:
            self.cross_norm, self.cross = LayerNorm(width, compute), CrossAttention(width, heads)
        self.has_cross = cross
        self.ff_norm, self.ff = LayerNorm(width, compute), FeedForward(width, m["ff_width"])

    def forward(self, x: Tensor, mask: Optional[Tensor], memory: Optional[Tensor] = None,
                memory_mask: Optional[Tensor] = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        if self.has_cross:
            query = self.cross_norm(x)
            x = x + self.cross(query, memory.to(query.dtype), memory_mask)
        return x + self.ff(self.ff_norm(x))


class Stack(nn.Module):
    def __init__(self, config: dict[str, Any], decoder: bool, cross: bool = False) -> None:
        super().__init__()
        for i in range(config["model"]["layers"]):
            self.add_module(str(i), TransformerLayer(config, decoder, cross))
        self.norm = LayerNorm(config["model"]["width"], _compute(config))

    def layers(self) -> list[TransformerLayer]:
        return [child for child in self.children() if isinstance(child, TransformerLayer)]

    def forward(self, x: Tensor, *masks_and_memory: Optional[Tensor]) -> Tensor:
        for layer in self.layers():
            x = layer(x, *masks_and_memory)
        return self.norm(x)


class Model(nn.Module):
    """What the models share. ids [B, L] int64; masks [B, L] bool, true = real token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config["info"]["vocab"], config["model"]["width"])

    def embedded(self, ids: Tensor) -> Tensor:
        self.check(ids, "ids")
        return self.embedding(ids)

    def check(self, ids: Tensor, name: str) -> None:
        vocab = self.embedding.weight.shape[0]
        wanted = f"expected whole numbers from 0 to {vocab - 1}, of shape [batch, length]"
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: found {getattr(ids, 'dtype', type(ids).__name__)}; {wanted}")
        if ids.dim() != 2:
            raise ValueError(f"{name}: found shape {list(ids.shape)}; {wanted}")
        if _has_values(ids):
            least, most = ids.min().item(), ids.max().item()
            if least < 0 or most >= vocab:
                raise ValueError(f"{name}: found {least if least < 0 else most}; {wanted}")


class LanguageModel(Model):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.decoder = Stack(config, decoder=True)
        m = config["model"]
        self.output = None if m["tied"] else Linear(m["width"], config["info"]["vocab"])

    def forward(self, ids: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Logits of the token after each of ids, [B, L, V]."""
        y = self.decoder(self.embedded(ids), mask)
        return self.embedding.tied_output(y) if self.output is None else self.output(y)


class Seq2Seq(Model):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True, cross=True)

    def forward(self, ids: Tensor, targets: Tensor, mask: Optional[Tensor] = None,
                target_mask: Optional[Tensor] = None) -> Tensor:
        """Logits of each of targets [B, T], which the decoder reads shifted right, [B, T, V]."""
        self.check(targets, "targets")
        memory = self.encoder(self.embedded(ids), mask)
        said = F.pad(targets[:, :-1], (1, 0), value=_BEGIN)
        y = self.decoder(self.embedding(said), target_mask, memory, mask)
        return self.embedding.tied_output(y)


class Classifier(Model):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.encoder = Stack(config, decoder=False)
        self.output = Linear(config["model"]["width"], config["info"]["classes"], bias=True)

    def forward(self, ids: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Logits of the classes, [B, classes]."""
        y = self.encoder(self.embedded(ids), mask)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        if mask is None:
            return self.output(y.mean(1, dtype=wide).to(y.dtype))
        count = mask.sum(1, keepdim=True).clamp_min(1)
        total = torch.where(mask[..., None], y, 0).sum(1, dtype=wide)
        return self.output((total / count).to(y.dtype))


def _has_values(x: Tensor) -> bool:
    """Whether they can be looked at: not while the code is traced or captured."""
    if x.numel() == 0 or x.is_meta or torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _compute(config: dict[str, Any]) -> torch.dtype:
    return _COMPUTE[config["train"]["precision"]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _split(x: Tensor, heads: int) -> Tensor:  # [B, L, E] -> [B, H, L, D]
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _causal_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def _dense(query: Tensor, key: Tensor, value: Tensor, key_mask: Optional[Tensor],
           seen: Optional[Tensor]) -> Tensor:
    """Attention to all that is real and seen ([L, S]); a query that sees nothing gives 0."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    visible = visible if seen is None else seen
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    nothing = ~visible.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(query, F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)),
                                          torch.cat([visible, nothing], -1))
