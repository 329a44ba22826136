"""A lead without a rival, for tests of what a coordinator does while it leads."""

from collections.abc import Iterable

from tandem_api.common.v1.common_pb2 import CoordinatorFence


class SoleLead:
    """The claim of a coordinator that cannot have a rival (coordinator.leader_lease.Lead)."""

    fence = CoordinatorFence()
    left_s = float("inf")
    is_held = True

    def confirm(self, epoch: int, slots: Iterable[str]) -> None:
        """Always."""

    def hold(self) -> None:
        """Always."""
