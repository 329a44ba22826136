"""A reward of your own: the parameters say by their names what a function gets (docs/rewards.md)."""

import re

_LAST_LINE = re.compile(r"(^|\n)#### -?\d[\d,.]*\s*$")


def tidy(completion: str, num_tokens: int, short: int = 150) -> float:
    """Score 1 for a short completion that ends with a line `#### N`, less for a longer one, 0 for any other end.

    >>> tidy("3 * 4 = 12\\n#### 12", num_tokens=9), tidy("#### 12", num_tokens=300), tidy("It is 12.", num_tokens=4)
    (1.0, 0.5, 0.0)
    """
    if not _LAST_LINE.search(completion):
        return 0.0
    return min(1.0, short / num_tokens)
