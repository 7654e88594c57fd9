"""Classes made for one use: a few bases under the name of the last, the stock class.

transformers decides by `isinstance` and by name, qualified name and module, so all of these stay as they are.
The same bases always give the same class, so that copies and pickles agree with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

__all__ = ["DERIVED", "become", "derived_class"]

DERIVED: dict[str, type] = {}
"""Every derived class by its key, which its instances have as `kconvert_class`.

The key is another one in each process.  A compiler that reads the class of a module guards it for every module; one that finds
it here, guards it once.
"""

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
        state = self.__dict__.copy()
        state.pop("kconvert_class", None)
        return _rebuild, (make, bases), state

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
            key = f"{stock.__module__}.{stock.__qualname__} {len(DERIVED)}"
            made = type(stock.__name__, bases, {**namespace, "kconvert_key": key})
            _CLASSES[bases] = DERIVED[key] = made
        return _CLASSES[bases]


def become(instance: Any, derived: type) -> None:
    """Make an instance of the stock class one of a derived class."""
    instance.__class__ = derived
    instance.__dict__["kconvert_class"] = derived.__dict__["kconvert_key"]


def _rebuild(make: Callable[..., type], bases: tuple[type, ...]) -> Any:
    derived: Any = make(*bases)
    made = derived.__new__(derived)
    become(made, derived)
    return made
