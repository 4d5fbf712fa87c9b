"""Reads what ``sinkhorn export`` writes: config.json and model.safetensors, memory mapped."""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Union

import torch
from torch import Tensor

_FORMAT = "sinkhorn export 1"
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}
_WORDS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Export:
    """A trained model as it lies on disk."""

    folder: Path
    config: dict[str, Any]
    """config.json: ``info`` (what the task is), ``task``, ``model``, ``encoder``, ``decoder``, ..."""
    state: dict[str, Tensor]
    """Parameters by name: views of the mapped file. A write stays in this process."""


def load_export(folder: Union[str, os.PathLike[str]], verify: bool = True) -> Export:
    """Reads an exported folder. With ``verify`` every byte is read once, to compare the files with
    the checksums in config.json (an older export has none); without, nothing but headers is read
    before it is used.

    Raises ValueError with the file's name and what is wrong where it is missing, truncated, damaged
    or of another program.
    """
    root = Path(folder)
    path = root / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{root}: not an export; expected config.json in it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("format") != _FORMAT:
        raise ValueError(f'{path}: not of an export: expected "format": "{_FORMAT}" in it')
    if verify and "crc32" in config:
        _check_files(root, config["crc32"])
    state = _load_tensors(root / "model.safetensors")
    _check_description(path, config, state)
    return Export(root, config, state)


def _check_files(root: Path, written: Any) -> None:
    for name in ("model.safetensors", "tokenizer.model"):
        path, expected = root / name, written.get(name) if isinstance(written, dict) else None
        if expected is None and not path.exists():
            continue
        if not isinstance(expected, str):
            raise ValueError(f"{root / 'config.json'}: crc32 has no checksum of {name}; export the "
                             "run again")
        found = f"{_checksum(path):08x}"
        if found != expected:
            raise ValueError(f"{path}: damaged or of another export: its CRC-32 is {found}, "
                             f"config.json says {expected}; copy the export again")


def _checksum(path: Path) -> int:
    with _open(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return zlib.crc32(data)


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; copy the export again") from None


def _check_description(path: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """What config.json says twice, or says of the tensors, must be the same."""
    dtype = _WORDS.get(config.get("dtype"))
    if dtype is None:
        raise ValueError(f"{path}: dtype is missing or not one of {', '.join(_WORDS)}")
    for name, tensor in state.items():
        if tensor.dim() > 1 and tensor.dtype != dtype:
            raise ValueError(f"{path}: dtype is {config['dtype']}, but {name} of model.safetensors "
                             f"has type {tensor.dtype}")
    try:
        info, task, longest = config["info"], config["task"], config["model"]["max_length"]
        sizes = [("vocab", "embedding.weight")]
        if info["model"] == "classifier":
            sizes.append(("classes", "output.weight"))
        for key, name in sizes:
            if name in state and info[key] != len(state[name]):
                raise ValueError(f"{path}: info.{key} is {info[key]}, but {name} of "
                                 f"model.safetensors has {len(state[name])} rows")
        if task["name"] not in ("sort", "recall") and info["max_length"] != task["length"]:
            raise ValueError(f"{path}: info.max_length is {info['max_length']}, but task.length is "
                             f"{task['length']}")
        if info["max_length"] > longest:
            raise ValueError(f"{path}: info.max_length is {info['max_length']}, but "
                             f"model.max_length is {longest}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error} is missing or unknown") from None


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: a header of {length} bytes in a file of {size}: truncated, "
                             "or not a safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            described = {name: _described(value) for name, value in header.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the header is damaged, or not of a safetensors file: "
                             f"{error!r}") from None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, covered = {}, 0
    for name, (dtype, shape, begin, end) in sorted(described.items(), key=lambda item: item[1][2:]):
        count = math.prod(shape)
        if begin != covered or end - begin != count * dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"{path}: tensor {name!r} does not lie where its shape says")
        covered = end
        tensors[name] = (torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + begin)
                         if count else torch.empty(0, dtype=dtype)).view(shape)
    if 8 + length + covered != size:
        raise ValueError(f"{path}: {size - 8 - length} bytes of data, but the header describes "
                         f"{covered}")
    return tensors


def _described(value: dict[str, Any]) -> tuple[torch.dtype, list[int], int, int]:
    shape, (begin, end) = value["shape"], value["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a size")
    return _TYPES[value["dtype"]], shape, begin, end
