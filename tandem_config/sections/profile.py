"""Which train steps are profiled, and what of them is recorded."""

from typing import Annotated

from pydantic import Field

from tandem_config.sections.base import ListOf, PositiveInt, Section, setting


class ProfileSection(Section):
    """Profiles of train steps: a trace (torch.profiler) and a table of each, in the run's folder `profile/`."""

    steps: int = setting(
        0, "a profiled step takes longer, and its trace some 20 megabytes (4 micro-batches of each part)", "steps", ge=0
    )
    """Consecutive train steps to profile, each by itself; 0: none. `tandem profile` shows them."""
    first: PositiveInt = setting(2, "the first step of a process allocates memory and loads kernels")
    """The first of them, as the run counts its train steps, from 1."""
    every: PositiveInt | None = setting(None, "one series shows most", "steps")
    """Steps from the beginning of one series to that of the next; null: there is one series."""
    ranks: ListOf[Annotated[int, Field(ge=0)]] = setting(
        (0,), "ranks do alike, but for pipeline stages and unequal shares"
    )
    """Trainer ranks to profile; []: all."""
    shapes: bool = setting(False, "makes traces larger and steps slower")
    """Record the shapes of operators' inputs."""
    memory: bool = setting(False, "makes traces larger; the peak is measured in every step anyway")
    """Record each allocation."""

    def covers(self, step: int, rank: int) -> bool:
        """Whether a rank profiles a step, which is counted from 1.

        >>> [step for step in range(1, 10) if ProfileSection(steps=2, first=3, every=4).covers(step, 0)]
        [3, 4, 7, 8]
        """
        if step < self.first or (self.ranks and rank not in self.ranks):
            return False
        since = step - self.first
        return (since if self.every is None else since % self.every) < self.steps
