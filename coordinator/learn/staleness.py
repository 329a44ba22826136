"""Age of samples: versions between the policy that sampled a token and the one that trains on it. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from coordinator.flow import Group


def oldest_versions(groups: Sequence[Group]) -> list[int]:
    """Return the oldest policy version of each sample, group by group: [S]."""
    return [completion.oldest_version for group in groups for completion in group.completions]


def staleness_histogram(versions: Iterable[int], current: int) -> dict[int, int]:
    """Count samples by age in versions.

    Args:
        versions: oldest version of each sample.
        current: version that trains on them.
    Returns: age (>= 0) to number of samples, ascending.
    Raises: ValueError: a version is newer than the current one.

    >>> staleness_histogram([7, 7, 5], current=7)
    {0: 2, 2: 1}
    """
    ages = Counter(current - version for version in versions)
    if ages and min(ages) < 0:
        raise ValueError(f"a sample carries version {current - min(ages)}, newer than the current version {current}")
    return dict(sorted(ages.items()))


def is_trainable(oldest: int, current: int, max_staleness: int) -> bool:
    """Whether a sample is young enough to train on: `current - oldest <= max_staleness`.

    >>> [is_trainable(oldest, 7, 1) for oldest in (5, 6, 7)]
    [False, True, True]
    """
    return current - oldest <= max_staleness


def stale_samples(groups: Sequence[Group], current: int, max_staleness: int) -> list[str]:
    """Return the ids of the samples that are too old to train on; in a synchronous iteration there should be none."""
    return [
        group.sample_id(index)
        for group in groups
        for index, completion in enumerate(group.completions)
        if not is_trainable(completion.oldest_version, current, max_staleness)
    ]
