"""Text columns: one policy for strings that are not clean UTF-8, and one form of JSON.

A lone surrogate (half of a UTF-16 pair; JSON APIs and broken decoders produce them) cannot be
stored as UTF-8. It is written as U+FDD0 plus four hex digits, and U+FDD0 itself as U+FDD0 twice,
so every Python string comes back exactly. NUL and all other characters are kept as they are.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

ESCAPE = "\ufdd0"
ESCAPE_BYTES = re.compile(ESCAPE.encode())
"""Finds the mark in UTF-8 of any length."""
_NEEDS_ESCAPE = re.compile("[\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0(\ufdd0|[0-9a-f]{4})")


def escape_text(text: str) -> str:
    r"""Text as it is stored.

    >>> escape_text("a\ud800") == "a\ufdd0d800"
    True
    """
    if text.isascii():
        return text
    return _NEEDS_ESCAPE.sub(
        lambda m: ESCAPE * 2 if m[0] == ESCAPE else f"{ESCAPE}{ord(m[0]):04x}", text
    )


def unescape_text(text: str) -> str:
    """The exact string that was handed to `escape_text`."""
    if text.isascii() or ESCAPE not in text:
        return text
    return _ESCAPED.sub(lambda m: ESCAPE if m[1] == ESCAPE else chr(int(m[1], 16)), text)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; NaN and infinities are refused (ValueError)."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    )


def difference(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Keys of two JSON trees whose values differ; None where there is no such key or section.

    >>> difference({"train": {"lr": 1.0, "betas": [0.9]}}, {"train": {"lr": 2.0, "betas": (0.9,)}})
    {'train.lr': (1.0, 2.0)}
    """
    found: dict[str, Any] = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if {type(a), type(b)} <= {dict, type(None)}:
            found |= difference(a or {}, b or {}, f"{where}{key}.")
        elif a != b and not (isinstance(a, list | tuple) and b in ([*a], (*a,))):
            found[where + key] = (a, b)
    return found
