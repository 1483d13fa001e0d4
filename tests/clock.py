"""A clock that stands still but for what is slept: given to a module in place of `time`, its answers are exact."""

DURATION = r"(?:\d+(?::\d\d)+|\d+\.\d s)"  # as it is written, of whatever length


class Clock:
    """Seconds since anything; a process that is forked has a clock of its own, which goes on from here.

    Args:
        look: seconds that it takes to look at it.
    """

    def __init__(self, look=0.0):
        self.now, self.look = 1000.0, look

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        self.now += self.look
        return self.now

    perf_counter = monotonic = time = read
