"""How a compiled Triton kernel takes its arguments: derived from its signature, and verified against its PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton import knobs


class NotDirect(Exception):
    """Why a kernel must be launched by Triton."""


@dataclass(frozen=True)
class Layout:
    """The parameters of a compiled kernel.

    Attributes:
        kinds: for each positional argument "pointer", "number" or "map" (a tensor descriptor); None for one that is
            compiled in; a tuple of these for a tuple.
        format: of `struct`, for all numbers in order, 8 bytes each; a tensor map is followed by its shape and strides.
        offsets: for each parameter of the kernel its place in these bytes; None for a tensor map.
        bytes: their number.
        map_parameters: parameter index of each tensor map; maps: how each is encoded.
    """

    kinds: tuple
    format: str
    offsets: tuple[int | None, ...]
    bytes: int
    map_parameters: tuple[int, ...]
    maps: tuple[dict[str, Any], ...]


_NUMBERS = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q"}
_SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8,
          "s64": 8, "f64": 8}  # fmt: skip
_MAP_BYTES = 128


def ptx_parameters(ptx: str) -> list[tuple[int, bool]]:
    """`(bytes, whether a pointer)` of each parameter of the kernel in a PTX text.

    Raises:
        NotDirect: the text has not one kernel, or a parameter that cannot be read.
    """
    entries = re.findall(r"\.entry\s+[\w$]+\s*\(([^)]*)\)", ptx)
    if len(entries) != 1:
        raise NotDirect(f"its PTX has {len(entries)} kernels")
    found = []
    for text in filter(None, (part.strip() for part in entries[0].split(","))):
        match = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\.ptr\b.*\s)?[\w$]+(?:\[(\d+)\])?", text, re.S)
        if match is None or match[1] not in _SIZES:
            raise NotDirect(f"its PTX has a parameter that is not understood: {text}")
        found.append((_SIZES[match[1]] * int(match[3] or 1), match[2] is not None))
    return found


def _threads(ptx: str) -> int:
    match = re.search(r"\.reqntid\s+(\d+)", ptx)
    return int(match[1]) if match else 0


def _kinds(types: Any) -> Any:
    """Of a signature's types, see `Layout.kinds`."""
    if isinstance(types, tuple):
        return tuple([_kinds(t) for t in types])
    if types == "constexpr":
        return None
    if types.startswith("*"):
        return "pointer"
    if types.startswith("tensordesc<"):
        return "map"
    if types in _NUMBERS:
        return "number"
    raise NotDirect(f"it takes an argument of type {types}")


def _leaves(types: Any) -> Iterator[str]:
    for t in types:
        if isinstance(t, tuple):
            yield from _leaves(t)
        elif t != "constexpr":
            yield t


def layout_of(kernel: Any, compiled: Any, count: int) -> Layout:
    """The layout of a kernel that is called with `count` positional arguments.

    Raises:
        NotDirect: with the reason why it must be launched by Triton.
    """
    _check_launch(kernel, compiled)
    types = list(compiled.src.signature.values())
    if any(t != "constexpr" for t in types[count:]):
        raise NotDirect("it is called with keyword arguments that are not constants")
    kinds = tuple([_kinds(t) for t in types[:count]])
    maps = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    formats: list[str] = []
    offsets: list[int | None] = []
    map_parameters: list[int] = []
    expected: list[tuple[int, bool]] = []

    def number(kind: str, size: int, pointer: bool = False) -> None:
        offsets.append(8 * len(formats))
        formats.append(kind)
        expected.append((size, pointer))

    for leaf in _leaves(types[:count]):
        if leaf.startswith("*"):
            number("Q", 8, True)
        elif leaf in _NUMBERS:
            number(_NUMBERS[leaf], int(leaf[1:]) // 8)
        else:
            rank = _rank(leaf, maps, len(map_parameters))
            map_parameters.append(len(offsets))
            offsets.append(None)
            expected.append((_MAP_BYTES, False))
            for kind, size in [("i4x", 4)] * rank + [("q", 8)] * rank:
                number(kind, size)
    for _ in range(2):  # the scratch memories, which are null
        number("8x", 8, True)
    _check_ptx(compiled, expected)
    if len(maps) != len(map_parameters):
        raise NotDirect(f"{len(maps)} tensor maps are described, and it takes {len(map_parameters)}")
    size = 8 * len(formats)
    return Layout(kinds, "<" + "".join(formats), tuple(offsets), size, tuple(map_parameters), maps)


def _rank(leaf: str, maps: tuple[dict[str, Any], ...], index: int) -> int:
    if index >= len(maps) or not isinstance(maps[index], dict):
        raise NotDirect("a tensor descriptor is not passed as a tensor map")
    meta = maps[index]
    if meta.get("fp4_padded") or meta.get("is_im2col") or "," in leaf.split("]")[0].split("[")[0]:
        raise NotDirect(f"a tensor map of an unusual kind: {meta}")
    return len(meta["block_size"])


def _check_launch(kernel: Any, compiled: Any) -> None:
    metadata = compiled.metadata
    for name, plain in (
        ("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False), ("global_scratch_size", 0),
        ("profile_scratch_size", 0), ("instrumentation_mode", ""),
    ):  # fmt: skip
        value = getattr(metadata, name, plain)
        if value != plain and value is not None:
            raise NotDirect(f"{name} is {value}")
    if metadata.target.backend != "cuda" or "ptx" not in compiled.asm:
        raise NotDirect(f"it is compiled for {metadata.target.backend}")
    if kernel.pre_run_hooks or getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        raise NotDirect("Triton has hooks that run before a launch or change the compilation")


def _check_ptx(compiled: Any, expected: list[tuple[int, bool]]) -> None:
    ptx = compiled.asm["ptx"]
    found = ptx_parameters(ptx)
    sizes, wanted = [size for size, _ in found], [size for size, _ in expected]
    if sizes != wanted:
        raise NotDirect(f"its parameters have {sizes} bytes in PTX, and {wanted} would be passed")
    if any(is_pointer and not wants for (_, is_pointer), (_, wants) in zip(found, expected)):
        raise NotDirect("a parameter that is a pointer in PTX would be passed a number")
    if _threads(ptx) != 32 * compiled.packed_metadata[0]:
        raise NotDirect(f"its PTX wants {_threads(ptx)} threads, its metadata say {compiled.packed_metadata[0]} warps")
