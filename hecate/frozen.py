"""Values that cannot change: mappings, and a hash of contents that is the same in every process."""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenDict(dict[Key, Value]):
    """A mapping that refuses changes and can be hashed."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is frozen; build a new one with {**mapping, key: value}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset((content_hash(k), content_hash(v)) for k, v in self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[Key, Value]], tuple[dict[Key, Value]]]:
        return type(self), (dict(self),)


def content_hash(value: Any) -> int:
    """A hash by which equal values are equal in every process: Python salts those of texts."""
    if isinstance(value, str):
        digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big")
    if isinstance(value, tuple):
        return hash(tuple(map(content_hash, value)))
    return 0x6E6F6E65 if value is None else hash(value)  # None: by its address, in Python 3.11
