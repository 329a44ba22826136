"""Step 2: prompts to groups of completions, spread over the rollout replicas (dispatch.py says how)."""

from collections.abc import Mapping

from coordinator.fleet.base import Fleet
from coordinator.flow import Generation, Prompt
from coordinator.generate.dispatch import Dispatch, Warn
from coordinator.generate.joiners import Patience, Seed
from coordinator.generate.sampling import Order
from servicekit.logs import get_logger
from servicekit.rpc.limits import MAX_COMPLETIONS_PER_CALL

log = get_logger(__name__)


class Rollouts:
    """The rollout replicas as one service.

    Args:
        fleet: its serving replicas get work.
        max_groups_per_call: most groups that a replica accepts in one call.
        timeout_s: deadline of one call.
        patience: how long to wait for a replica that does not answer, and for one to join when none is left.
        seed: brings a version to replicas that join (WeightSync.seed_late_joiners); None: replicas cannot join.
        warn: gets a message when no replica is left, and when one joins; None: the messages are logged.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_groups_per_call: int,
        timeout_s: float,
        patience: Patience | None = None,
        seed: Seed | None = None,
        warn: Warn | None = None,
    ) -> None:
        self._fleet = fleet
        self._max_groups_per_call = max_groups_per_call
        self._timeout_s = timeout_s
        self._patience = Patience() if patience is None else patience
        self._seed = seed
        self._warn = log.warning if warn is None else warn

    async def generate(self, prompts: Mapping[str, Prompt], order: Order) -> Generation:
        """Sample `order.num_completions` completions for each prompt.

        Args:
            prompts: prompts by group id.
        Returns: groups in the prompts' order.
        Raises:
            InvalidRequest, TooLarge: a replica refuses the request; repeating it would not help.
            Unavailable: no replica is left, and none joined in time; the message has the last error of each.
            TandemError: seeding a joiner failed for good, while no other replica works.
        """
        # Balanced: as many equal chunks as whole rounds over the replicas need.
        most = min(self._max_groups_per_call, max(1, MAX_COMPLETIONS_PER_CALL // order.num_completions))
        num_chunks = max(1, len(self._fleet.serving()), -(-len(prompts) // most))
        size = max(1, -(-len(prompts) // num_chunks))
        ids = list(prompts)
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        dispatch = Dispatch(
            self._fleet,
            prompts,
            order,
            timeout_s=self._timeout_s,
            patience=self._patience,
            seed=self._seed,
            warn=self._warn,
        )
        return await dispatch.run(chunks)
