"""Classes made for one use: a few bases under the name of the last, the stock class.

transformers decides by `isinstance` and by name, qualified name and module, so all of these stay as they are.
The same bases always give the same class, so that copies and pickles agree with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

__all__ = ["derived_class"]

_CLASSES: dict[tuple[type, ...], type] = {}
_LOCK = Lock()


def derived_class(
    make: Callable[..., type], bases: tuple[type, ...], members: Callable[[], Mapping[str, Any]] | None = None
) -> Any:
    """The class that derives from `bases` and is called what the last of them is called.

    Args:
        make: the module-level function that makes it from its bases; a pickle names this function.
        bases: mixins first, the stock class last.
        members: gives further class attributes; called once, when the class is made.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (make, bases), self.__dict__.copy()

    with _LOCK:
        if bases not in _CLASSES:
            stock = bases[-1]
            namespace = {
                "__module__": stock.__module__,
                "__qualname__": stock.__qualname__,
                "__doc__": stock.__doc__,
                "__reduce_ex__": reduce,
                "kconvert_stock_class": stock,
                **(members() if members is not None else {}),
            }
            _CLASSES[bases] = type(stock.__name__, bases, namespace)
        return _CLASSES[bases]


def _rebuild(make: Callable[..., type], bases: tuple[type, ...]) -> Any:
    made: Any = make(*bases)
    return made.__new__(made)
