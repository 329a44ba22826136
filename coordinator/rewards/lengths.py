"""Rewards of the completion's length alone, in tokens."""

from collections.abc import Callable, Sequence

from coordinator.rewards.base import Reward, ScoredText, Scores


def length_score(num_tokens: int, *, full: int, zero: int) -> float:
    """Score a length: 1 at `full` and beyond it, 0 at `zero` and beyond that, linear in between.

    >>> [length_score(tokens, full=100, zero=300) for tokens in (50, 100, 250, 400)]
    [1.0, 1.0, 0.25, 0.0]
    >>> [length_score(tokens, full=300, zero=100) for tokens in (50, 100, 250, 400)]
    [0.0, 0.0, 0.75, 1.0]
    """
    return min(1.0, max(0.0, (zero - num_tokens) / (zero - full)))


def overlong_score(num_tokens: int, *, longest: int, cache: int) -> float:
    """Compute DAPO's soft overlong punishment, arXiv 2503.14476, equation 13.

    With |y| tokens, L_max = `longest` and L_cache = `cache`: 0 up to L_max - L_cache, then
    ((L_max - L_cache) - |y|) / L_cache, and -1 above L_max.

    >>> [overlong_score(tokens, longest=20480, cache=4096) for tokens in (0, 16384, 17408, 20480, 20481)]
    [0.0, 0.0, -0.25, -1.0, -1.0]
    """
    return max(-1.0, min(0.0, (longest - cache - num_tokens) / cache))


class PerLength(Reward):
    """Reward completions by their tokens alone.

    Args:
        score_of: of a number of tokens; see `length_score` and `overlong_score`.
    """

    def __init__(self, score_of: Callable[[int], float]) -> None:
        self._score_of = score_of

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        return Scores(values=[self._score_of(item.num_tokens) for item in items])
