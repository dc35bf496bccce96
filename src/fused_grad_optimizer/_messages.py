"""How values that a caller gave are shown in error messages."""

from __future__ import annotations

from typing import Any

import torch

_LONGEST = 80
_SCALARS = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device)


def shown(value: Any) -> str:
    """`repr` of a short scalar or of a few of them; of anything else the type, with its shape or length."""
    if _is_short(value):
        try:
            text = repr(value)
        except ValueError:  # an int of more digits than Python prints
            text = None
        if text is not None and len(text) <= _LONGEST and "\n" not in text:
            return text
    kind = type(value).__name__
    kind = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    shape = _asked(lambda: tuple(value.shape))
    if shape is not None:
        return f"{kind} of shape {shape}"
    length = _asked(lambda: len(value))
    return kind if length is None else f"{kind} of length {length}"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS) or _asked(lambda: tuple(value.shape)) == ()


def _is_short(value: Any) -> bool:
    if type(value) is dict:
        return len(value) <= 8 and all(_is_scalar(v) for pair in value.items() for v in pair)
    if type(value) in (list, tuple):
        return len(value) <= 8 and all(_is_scalar(v) for v in value)
    return _is_scalar(value)


def _asked(question):
    try:
        return question()
    except Exception:  # whatever the caller's own class raises, the message is about something else
        return None
