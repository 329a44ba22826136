"""A receiver is killed in the middle of a round: the others live, and the next round commits without it."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_api.weights.v1 import weights_pb2 as pb
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import CALL_S, ServiceFleet, Strike, committed
from tools.gpu_check.services.rounds import check_round, differing, figures
from tools.gpu_check.services.settings import LEASE_TTL_S

# From the death to the round that is committed without it: the lease, and what the round itself takes.
PROMISED_S = LEASE_TTL_S + 3.0
# Logged by a rank (weightsync/transfer/transports/links.py) right before it connects to those that it exchanges
# messages with.
AGREED = b"transport agreed"
# Tries of a transfer that was over before it could be harmed.
TRIES = 3


@dataclass
class Blow:
    """When the victim was killed (time.monotonic); 0.0: not yet."""

    fleet: ServiceFleet
    victim: str
    at_s: float = field(default=0.0)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        self.fleet.send_signal(self.victim, signal.SIGKILL)
        self.at_s = time.monotonic()


async def check_deaths(fleet: ServiceFleet, findings: Findings) -> None:
    """In the middle of a transfer over connections that stand, then at the first use of those of a new epoch."""
    first, second = fleet.replicas
    await check_round(fleet, findings, "round over a chain of two replicas")
    await check_death(fleet, findings, "receiver killed in TRANSFER", second, in_transfer)
    await fleet.start_again([second])
    await check_death(fleet, findings, "receiver killed at the first use of its connections", first, at_first_use)


async def check_death(
    fleet: ServiceFleet, findings: Findings, name: str, victim: str, strike: Callable[[Blow, dict[str, str]], Strike]
) -> None:
    """One death: who lives, what they hold, and how long it took."""
    survivors = [replica for replica in fleet.replicas if replica != victim]
    version = (await fleet.trainer.status()).policy_version
    truth = await fleet.truth(await fleet.export(), survivors)
    blow = Blow(fleet, victim)
    for _ in range(TRIES):
        poisoned = await fleet.poison()
        fleet.trainer.strike = strike(blow, poisoned[f"{fleet.replicas[0]}/0"])
        result = await fleet.publish(version, install="in_place")
        if blow.at_s:
            break
    seconds = time.monotonic() - blow.at_s
    wrong = wrong_deaths(fleet.ended(), victim, seconds if blow.at_s else None)
    wrong += committed(result, survivors) + differing(truth, poisoned, await fleet.checksums(survivors))
    findings.add(name, wrong, seconds_from_kill_to_commit=round(seconds, 2), promised=PROMISED_S, **figures(result))


def wrong_deaths(ended: dict[str, str], victim: str, seconds: float | None) -> list[str]:
    """What is wrong with which services have died and when the rest continued.

    Args: ended: services that have ended, with how. seconds: from the kill to the commit; None: it was not killed.
    """
    if seconds is None:
        return [f"{victim} was not killed: the transfer was over before it could be, {TRIES} times"]
    wrong = [how for name, how in ended.items() if name != victim]
    if victim not in ended:
        wrong.append(f"{victim} was killed and lives")
    if seconds > PROMISED_S:
        wrong.append(f"{seconds:.1f} s from the kill to the committed round, promised {PROMISED_S:g}")
    return wrong


def in_transfer(blow: Blow, poisoned: dict[str, str]) -> Strike:
    """Once a byte has come to the first replica. Trainer rank 0 is frozen meanwhile, so that bytes are still to come.

    poisoned: digests of the first replica's first rank before the round.
    """
    fleet = blow.fleet
    stub = fleet.receivers(fleet.replicas[0])[0]

    async def unwritten() -> int:
        now = (await stub.GetChecksums(pb.GetChecksumsRequest(), timeout=CALL_S)).checksums
        return sum(now[name] == digest for name, digest in poisoned.items())

    async def begun() -> bool:
        return await unwritten() < len(poisoned)

    async def during() -> None:
        await fleet.until(begun, CALL_S, "the first byte of a transfer")
        sender = fleet.trainer_ranks[0]
        fleet.send_signal(sender, signal.SIGSTOP)
        try:
            if await unwritten() > 0:
                blow.kill()
        finally:
            fleet.send_signal(sender, signal.SIGCONT)

    return Strike(phase=pb.ROUND_PHASE_TRANSFER, during=during)


def at_first_use(blow: Blow, poisoned: dict[str, str]) -> Strike:
    """In PREPARE of an epoch's first round, once the trainer has agreed with all ranks and connects to them."""
    fleet = blow.fleet
    log = fleet.run_dir / "logs" / f"{fleet.trainer_ranks[0]}.log"
    known = log.stat().st_size

    async def agreed() -> bool:
        with log.open("rb") as file:
            file.seek(known)
            return AGREED in file.read()

    async def during() -> None:
        await fleet.until(agreed, CALL_S, "the trainer to connect to the receivers")
        blow.kill()

    return Strike(phase=pb.ROUND_PHASE_PREPARE, during=during)
