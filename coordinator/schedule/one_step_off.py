"""One step off: while the trainer works on an iteration, the replicas generate the next one.

             trainer                                  replicas
iteration n  scores, trains: version v -> v + 1       generate n + 1 with version v
             waits, if they are not done              wait, if they are done
             sends v + 1                              take v + 1

So an iteration lasts as long as the slower of the two. Samples are of the policy one version before the one that is
trained, but for those of the first iteration. No completion mixes policies, because nothing is generated in a sync.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from coordinator.data.cursor import CursorState
from coordinator.generate.dispatch import Rollouts
from coordinator.schedule.sync import NOTHING, Begun, SyncSchedule
from servicekit.errors import TandemError
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import IterationRecord

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class OneStepOff(SyncSchedule):
    """Iterations of which each is generated during the one before.

    Attributes:
        beside_training: generates while the trainer is at work; only replicas can seed those that join then.
        iterations: run.iterations; nothing is generated for one after the last.
    """

    MAX_STALENESS: ClassVar[int] = 1
    beside_training: Rollouts
    iterations: int
    # The next iteration, once its groups are under way.
    _ahead: list[Begun] = field(default_factory=list, init=False, repr=False)

    async def iterate(
        self, number: int, policy_version: int, watch: Stopwatch, during_training: BackgroundTask[Any] = NOTHING
    ) -> IterationRecord:
        """As SyncSchedule, with what was generated during the iteration before."""
        with watch.part("generate"):
            begun = self._ahead.pop() if self._ahead else await self.begin(policy_version)
            generation = begun.generation or await self.generate(begun, policy_version, self.rollouts)
            # After a step that the trainer has done already, the replicas serve a newer version than this iteration's.
            if number < self.iterations and not self.ledger.past.sent(number):
                self._ahead.append(await self.begin(policy_version))
        ahead = [partial(self._generate_ahead, following, policy_version) for following in self._ahead]
        async with BackgroundTask(*ahead) as generating:
            record = await self.learn(number, generation, policy_version, watch, during_training)
            if generating.has_work:
                with watch.part("generate"):
                    await generating.result()
        with watch.part("sync"):
            record = replace(record, sync=await self.publish(record.step))
        return await self.compared(record, watch, is_due=False)

    def position(self) -> CursorState:
        """Return the position of the data after the last iteration; the next one's prompts may be taken."""
        return self._ahead[0].before if self._ahead else super().position()

    async def _generate_ahead(self, begun: Begun, policy_version: int) -> None:
        """Generate an iteration while the trainer works on the one before; what fails then, it generates itself."""
        patience = replace(self.beside_training.patience, rejoin_s=0.0)  # the sync would have to wait, too
        generating = self.generate(begun, policy_version, replace(self.beside_training, patience=patience))
        try:
            await first_of({"generation": generating, "ending": self.ending})
        except TandemError as error:
            missing = len(begun.prompts) - len(begun.groups)
            log.warning("generation ahead failed: continued later", groups=missing, error=str(error))
