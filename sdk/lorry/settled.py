"""A value that tolerates one `await` or `.result()` too many.

The documents that users copy from disagree on how often a call must be awaited. A value that was reached by
skipping a level is handed out as a view: it is the value (isinstance, attributes, equality), and awaiting it
gives the plain value, which is not awaitable, so that code that awaits "until it is no longer awaitable" ends.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Generator
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import BaseModel

V = TypeVar("V")


class _Settled:
    _plain = None  # without an annotation, which pydantic would take for a private attribute

    def __await__(self) -> Generator[Any, None, Any]:
        return self._plain
        yield  # a generator that ends at once

    def result(self, timeout: float | None = None) -> Any:
        return self._plain

    async def result_async(self, timeout: float | None = None) -> Any:
        return self._plain

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == (other._plain if isinstance(other, _Settled) else other))

    def __hash__(self) -> int:  # asyncio.gather wants what it waits for to be hashable; lists are not
        return id(self)


_view_classes: dict[type, Any] = {}
_sharing = threading.Lock()


def _view_class(cls: type) -> Any:
    view = _view_classes.get(cls)
    if view is None:
        view = types.new_class(cls.__name__, (_Settled, cls))
        view.__module__, view.__qualname__ = cls.__module__, cls.__qualname__
        _view_classes[cls] = view
    return view


def settle(value: V) -> V:
    """`value` itself where a view cannot be made (None, numbers, strings, paths)."""
    if isinstance(value, _Settled | int | float | str | PurePath) or value is None:
        return value
    view: Any
    if isinstance(value, BaseModel):
        view = _view_class(type(value)).model_construct(**dict(value))
        object.__setattr__(view, "_plain", value)
    elif isinstance(value, list):
        view = _view_class(list)(value)
        view._plain = value
    else:
        view = object.__new__(_view_class(type(value)))
        with _sharing:
            if "_plain" not in vars(value):
                # From Python 3.13 on an object keeps its attributes in itself, and the garbage collector does not
                # see that whoever shares its __dict__ holds them, too: it would empty them. A copy is a dict like any.
                value.__dict__ = dict(vars(value))
                object.__setattr__(value, "_plain", value)
            view.__dict__ = value.__dict__  # one state, two faces
    return view  # type: ignore[no-any-return]
