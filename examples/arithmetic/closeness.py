"""A reward of your own for the example: sums that are nearly right earn something.

reward:
  - {kind: exact_match}
  - {function: closeness.py:closeness, weight: 0.2, args: {tolerance: 20}}
"""


def closeness(completion: str, answer: str, tolerance: int = 10) -> float:
    """Score 1 for the right sum, falling to 0 at `tolerance` beside it; 0 for what is no number."""
    if not completion.isdigit():
        return 0.0
    return max(0.0, 1.0 - abs(int(completion) - int(answer)) / tolerance)
