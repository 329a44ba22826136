"""This rank's part in weight-sync rounds."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack

from servicekit.errors import Internal, TandemError, WrongVersion
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, Phase

log = get_logger(__name__)

# The phases that need the trainer at the round's version; COMMIT and ABORT must work at any.
_NEEDS_VERSION = (PREPARE, TRANSFER)


class Publisher:
    """Runs phases; sending only reads the weights, so a failed round is not a failure of the trainer.

    Args:
        run_phase: SyncMember.run_phase of this rank; blocks until the phase is done, at most until its deadline.
        weights: has the weights in memory inside of a `with` block: from PREPARE, which looks at them, to the end of
            the round. After a TRANSFER that failed, messages may still be read from there until ABORT. The block gets
            its seconds by part (TrainerEngine.weights).
    """

    def __init__(
        self,
        run_phase: Callable[[Phase, weights_pb2.Round], weights_pb2.PhaseReport],
        weights: Callable[[], AbstractContextManager[Mapping[str, float]]],
    ) -> None:
        self._run_phase, self._weights = run_phase, weights
        self._held, self._held_for = ExitStack(), ""
        self._seconds: Mapping[str, float] = {}

    def run(self, phase: Phase, round_: weights_pb2.Round, policy_version: int) -> weights_pb2.PhaseReport:
        """Run one phase.

        Raises: WrongVersion: the round announces another version than the trainer's; a TandemError of the member.
        """
        if phase in _NEEDS_VERSION and round_.policy_version != policy_version:
            raise WrongVersion(
                f"round {round_.round_id} announces policy version {round_.policy_version}, "
                f"the trainer has {policy_version}"
            )
        known = {} if phase == PREPARE else dict(self._seconds)
        if phase == PREPARE:
            self._hold(round_.round_id)
        try:
            report = self._run_phase(phase, round_)
        except TandemError:
            raise
        except Exception as error:  # the boundary of the round: the trainer keeps running
            log.error("sync phase failed", round_id=round_.round_id, phase=phase, exc_info=error)
            raise Internal(f"phase {phase} of round {round_.round_id}: {type(error).__name__}: {error}") from error
        finally:
            # an ABORT may be of an older round
            if phase in (COMMIT, ABORT) and round_.round_id == self._held_for:
                self._held.close()
        report.seconds.update({part: value for part, value in self._seconds.items() if part not in known})
        return report

    def _hold(self, round_id: str) -> None:
        """Have the weights in memory; all ranks do so together, also those that have them since an older round."""
        with ExitStack() as fresh:
            self._seconds = fresh.enter_context(self._weights())
            self._held.close()
            self._held, self._held_for = fresh.pop_all(), round_id
