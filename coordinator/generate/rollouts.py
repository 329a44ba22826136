"""Step 2: prompts to groups of completions, spread over the rollout replicas (dispatch.py says how)."""

from collections.abc import Mapping

from coordinator.fleet.base import Fleet
from coordinator.flow import Generation, Prompt
from coordinator.generate.dispatch import Dispatch, Tell
from coordinator.generate.joiners import Patience, Seed
from coordinator.generate.order import Order
from servicekit.logs import get_logger

log = get_logger(__name__)


class Rollouts:
    """The rollout replicas as one.

    Args:
        fleet: those of it that serve get work.
        max_groups_per_call: most groups that a replica accepts in one call.
        timeout_s: deadline of one call.
        patience: how long a replica that does not answer, and a fleet without any, is waited for.
        seed: brings a version to replicas that come (WeightSync.seed_late_joiners); None: nobody does.
        tell: is told, in words, that nobody is left, and who has come; None: log lines say it.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_groups_per_call: int,
        timeout_s: float,
        patience: Patience | None = None,
        seed: Seed | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._fleet = fleet
        self._max_groups_per_call = max_groups_per_call
        self._timeout_s = timeout_s
        self._patience = Patience() if patience is None else patience
        self._seed = seed
        self._tell = log.warning if tell is None else tell

    async def generate(self, prompts: Mapping[str, Prompt], order: Order) -> Generation:
        """Sample `order.num_completions` completions for each prompt.

        Args:
            prompts: prompts by group id.
        Returns: groups in the prompts' order.
        Raises:
            InvalidRequest, TooLarge: a replica refuses the request; repeating it would not help.
            Unavailable: no replica is left, and none came in time; each is named with its last error.
            TandemError: of the seeding of replicas that came, where nobody else works and another try would not help.
        """
        # Balanced: as many equal chunks as whole rounds over the replicas need.
        num_chunks = max(1, len(self._fleet.serving()), -(-len(prompts) // self._max_groups_per_call))
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
            tell=self._tell,
        )
        return await dispatch.run(chunks)
