"""How much is done, counted in calls: no clock, so no machine makes it more."""

import sys


def calls_of(function, *args, **words):
    """(what the function returns, how many functions were called in it, those written in C with them)."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        result = function(*args, **words)
    finally:
        sys.setprofile(None)
    return result, count
