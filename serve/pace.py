"""How many chunks of waiting prompts go with a round: slots of ended texts should not stand empty, nor those who decode
wait long. No jax."""

import math

MEMORY = 0.8  # of the running means


class Pace:
    """Remembers what finished rounds and chunks took and gave."""

    def __init__(self) -> None:
        self._round, self._chunk, self._tokens = 0.0, 0.0, 1.0

    @property
    def chunks(self) -> int:
        """For the next step: a chunk for each token that requests got in the last round, since drafting ends texts
        sooner than plain decoding does; and as many as together take no longer than a round, so that prompts get up to
        half of the device's time while they wait."""
        in_time = int(self._round / self._chunk) if self._chunk > 0 else 0
        return max(math.ceil(self._tokens), in_time)

    def saw_round(self, seconds: float, tokens: float) -> None:
        """A round is over: its time, and the mean number of tokens that its requests got."""
        self._round = _mixed(self._round, seconds)
        self._tokens = tokens

    def saw_chunk(self, seconds: float) -> None:
        self._chunk = _mixed(self._chunk, seconds)


def _mixed(mean: float, new: float) -> float:
    return MEMORY * mean + (1 - MEMORY) * new if mean else new
