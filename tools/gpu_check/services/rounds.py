"""Rounds between the real services: what they write is what SGLang's own loader would, and both compute the same."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_clients.flow import SyncResult
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import CALL_S, Checksums, ServiceFleet, committed
from tools.gpu_check.services.samples import (
    Floats,
    Sample,
    first_of,
    generate,
    labels,
    rollout_logprobs,
    train_step,
    trainer_logprobs,
)
from tools.gpu_check.services.settings import Scale

FIRST = "rollout-0"


async def check_round(
    fleet: ServiceFleet, findings: Findings, name: str, replicas: Sequence[str] | None = None, **sync: Any
) -> list[Sample]:
    """A round of the trainer's policy of now over poisoned replicas; then checksums, then log-probs.

    Args: replicas: those that must have committed; None: all. sync: changes of that section.
    Returns: samples of the first replica under the new version.
    """
    replicas = fleet.replicas if replicas is None else replicas
    version = (await fleet.trainer.status()).policy_version
    truth = await fleet.truth(await fleet.export(), replicas)
    poisoned = await fleet.poison(replicas)
    result = await fleet.publish(version, **sync)
    wrong = committed(result, replicas) + differing(truth, poisoned, await fleet.checksums(replicas))
    findings.add(name, wrong, **figures(result))
    return await check_parity(fleet, findings, f"{name}: log-probs", replicas[0], version)


def figures(result: SyncResult) -> dict[str, Any]:
    """What a publication took."""
    return {
        "seconds": round(result.total_s, 3),
        "bytes": result.bytes_received,
        "rounds": result.attempts,
        "stages": {name: round(seconds, 4) for name, seconds in result.stages.items()},
    }


def differing(truth: Checksums, poisoned: Checksums, now: Checksums) -> list[str]:
    """What a replica holds that is not what SGLang's own loader makes of the trainer's export.

    poisoned: digests of NaN everywhere, without which a parameter that a sync forgets would pass.
    """
    wrong = []
    for slot, expected in truth.items():
        same = [name for name in expected if poisoned[slot][name] == expected[name]]
        different = [name for name in expected if now[slot].get(name) != expected[name]]
        wrong += [f"{slot}: {name} was not poisoned, so nothing can be said of it" for name in same]
        wrong += [f"{slot}: {name} is not what SGLang's own loader writes" for name in different]
    return wrong


async def check_parity(fleet: ServiceFleet, findings: Findings, name: str, replica: str, version: int) -> list[Sample]:
    """Log-probs of the replica's samples against the trainer's. Returns: the samples."""
    samples = await generate(fleet, replica, version)
    theirs, ours = rollout_logprobs(samples), await trainer_logprobs(fleet, samples)
    odd = fleet.scale.odd_experts if fleet.shape.experts > 0 else 0.0
    wrong = apart(theirs, ours, fleet.scale, odd) + [
        f"tokens of version {version} are labelled {other}" for other in set(labels(samples).tolist()) - {version}
    ]
    difference = np.abs(theirs - ours)
    findings.add(
        name,
        wrong,
        tokens=len(ours),
        largest=float(difference.max()),
        mean=float(difference.mean()),
        share_beyond_limit=float((difference > fleet.scale.logprob_limit).mean()),
    )
    return samples


def apart(theirs: Floats, ours: Floats, scale: Scale, odd: float = 0.0) -> list[str]:
    """[T], [T] log-probs of rollout and trainer: what is wrong with them.

    odd: share of the tokens that may be any finite distance apart, and do not count.
    """
    if len(theirs) == 0 or len(theirs) != len(ours):
        return [f"{len(theirs)} log-probs of the rollout, {len(ours)} of the trainer"]
    difference = np.sort(np.abs(theirs - ours))
    if not np.isfinite(difference).all():
        return ["some log-probs are not finite"]
    difference = difference[: len(difference) - int(odd * len(difference))]
    wrong = []
    if difference[-1] > scale.logprob_limit:
        wrong.append(f"log-probs are up to {difference[-1]:.3g} apart, limit {scale.logprob_limit:g}")
    if difference.mean() > scale.logprob_mean_limit:
        wrong.append(f"log-probs are {difference.mean():.3g} apart in the mean, limit {scale.logprob_mean_limit:g}")
    return wrong


async def check_dense(fleet: ServiceFleet, findings: Findings) -> list[Sample]:
    """in_place, staged, keep_kv, each of another policy. Returns: samples to train on."""
    samples = await check_round(fleet, findings, "in_place round", install="in_place")
    await train_step(fleet, "before-staged", samples)
    samples = await check_round(fleet, findings, "staged round", install="staged")
    await check_keep_kv(fleet, findings, samples)
    return samples


async def check_keep_kv(fleet: ServiceFleet, findings: Findings, samples: Sequence[Sample]) -> None:
    """Freeze completions, change the weights, resume; then check which tokens are labelled with which version."""
    old = (await fleet.trainer.status()).policy_version
    saved = fleet.run_dir / "before-keep-kv"
    await fleet.trainer.save_checkpoint(saved)
    idle = (await _status(fleet)).engine_progress
    under_way = asyncio.create_task(
        generate(fleet, FIRST, old, number=4, copies=1, max_tokens=fleet.scale.long_completion), name="completions"
    )
    try:
        await fleet.until(lambda: _computes(fleet, idle), CALL_S, "tokens of completions under way")
        pause = rollout_pb2.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP_KV)
        await fleet.rollout(FIRST).PauseGeneration(pause, timeout=CALL_S)
        new = await train_step(fleet, "before-keep-kv", samples)
        await check_round(fleet, findings, "keep_kv round", install="in_place", pause="keep_kv")
        spanned = await asyncio.wait_for(under_way, CALL_S)
    finally:
        under_way.cancel()
    theirs, after = rollout_logprobs(spanned), await trainer_logprobs(fleet, spanned)
    await fleet.trainer.restore(saved, new + 1)
    before = await trainer_logprobs(fleet, spanned)
    labelled_old = labels(spanned) == old
    findings.add(
        "keep_kv round: versions of tokens",
        mislabelled(spanned, theirs, before, old, new, fleet.scale),
        old_tokens=int(labelled_old.sum()),
        new_tokens=int((labels(spanned) == new).sum()),
        # a token of the new policy stands on keys and values of the old one, which the trainer does not compute
        mean_apart_from_new=float(np.abs(theirs - after)[~labelled_old].mean()) if not labelled_old.all() else None,
    )


async def _status(fleet: ServiceFleet) -> rollout_pb2.GetStatusResponse:
    status: rollout_pb2.GetStatusResponse = await fleet.rollout(FIRST).GetStatus(
        rollout_pb2.GetStatusRequest(), timeout=CALL_S
    )
    return status


async def _computes(fleet: ServiceFleet, idle: int) -> bool:
    """Whether a call is under way, and tokens of it have been computed."""
    status = await _status(fleet)
    return bool(status.running_groups > 0 and status.engine_progress != idle)


def mislabelled(
    samples: Sequence[Sample], theirs: Floats, before: Floats, old: int, new: int, scale: Scale
) -> list[str]:
    """Check that tokens with the old label are the old policy's, and that the first with the new one is not.

    Args: theirs, before: [T] log-probs by the rollout, and by the trainer under the old policy.
    """
    named = labels(samples)
    if set(named.tolist()) != {old, new}:
        return [f"tokens are labelled {sorted(set(named.tolist()))}, not {old} and then {new}"]
    wrong = [f"labelled {old}: {problem}" for problem in apart(theirs[named == old], before[named == old], scale)]
    firsts = first_of(samples, new)
    # by chance one token may be as likely under both
    if len(firsts) and bool((np.abs(theirs - before)[firsts] <= scale.logprob_limit).all()):
        wrong.append(f"the first token that is labelled {new} has the log-prob of version {old}, in every completion")
    return wrong
