"""Canonical: a state in the form in which its bytes depend on its values alone, not on which objects happen to hold them."""

from __future__ import annotations

from typing import Any

MOST = 10_000  # items of a list or dict that is looked through: longer ones are data


def canonical(item: Any, words: dict[str, str] | None = None, depth: int = 20) -> Any:
    """The same nest of plain values with one object for equal strings, and of its own for each list, dict and tuple.

    Pickle writes an object once, and a reference where it comes again. A run that was resumed holds the same names as the
    run that was not, but some of them in other objects, and its files would be longer or shorter for it.

    Example:
        >>> import pickle
        >>> one, other = ["a b", "a b"], ["a b", "".join(["a", " b"])]
        >>> pickle.dumps(one) == pickle.dumps(other), pickle.dumps(canonical(one)) == pickle.dumps(canonical(other))
        (False, True)
    """
    words = {} if words is None else words
    kind = type(item)
    if kind is str:
        return words.setdefault(item, item)
    if kind not in (dict, list, tuple) or len(item) > MOST or not depth:
        return item
    if kind is dict:
        return {canonical(key, words, 1): canonical(value, words, depth - 1) for key, value in item.items()}
    return kind([canonical(value, words, depth - 1) for value in item])
