"""A fake clock that advances only when it sleeps, so that measured durations are exact."""

# This pattern matches a printed duration of any length, such as "3.2 s" or "1:02:03".
DURATION = r"(?:\d+(?::\d\d)+|\d+\.\d s)"


class Clock:
    """Count seconds. A forked process continues with its own copy of the clock.

    Args:
        look: The number of seconds that each reading of the clock takes.
    """

    def __init__(self, look=0.0):
        self.now, self.look = 1000.0, look

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        self.now += self.look
        return self.now

    perf_counter = monotonic = time = read
