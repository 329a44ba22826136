"""RewardService over a RewardScorer."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from reward_service.scorer import NotScored, Outcome, RewardSample, RewardScorer, SampleScore
from servicekit.errors import Internal, InvalidRequest, TandemError, Unavailable
from tandem_api.reward.v1 import reward_pb2, reward_pb2_grpc

FULL_NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Scores in the scorer's own threads, so that health is answered meanwhile."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._threads = ThreadPoolExecutor(scorer.threads, thread_name_prefix="score")
        self._ready = False

    async def load(self) -> None:
        """Let the scorer get ready; until then calls are refused."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._scorer.load)
        self._ready = True

    def close(self) -> None:
        """End the threads, except one that is scoring."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.DescribeResponse:
        """Return what is served, and what it needs."""
        scorer = self._scorer
        return reward_pb2.DescribeResponse(
            name=scorer.name,
            version=scorer.version,
            max_batch_size=scorer.max_batch_size,
            required_columns=scorer.required_columns,
            needs_token_ids=scorer.needs_token_ids,
            needs_whole_groups=scorer.needs_whole_groups,
        )

    async def ScoreBatch(
        self, request: reward_pb2.ScoreBatchRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreBatchResponse:
        """Score samples."""
        if not self._ready:
            raise Unavailable("the scorer is still loading")
        samples = [_sample(sample) for sample in request.samples]
        most = self._scorer.max_batch_size
        if most and len(samples) > most:
            raise InvalidRequest(f"samples has {len(samples)} items; {self._scorer.name} takes at most {most}")
        if not samples:
            return reward_pb2.ScoreBatchResponse()
        outcomes = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, samples)
        scores = [_score(sample.sample_id, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]
        return reward_pb2.ScoreBatchResponse(scores=scores)

    def _score(self, samples: Sequence[RewardSample]) -> Sequence[Outcome]:
        """Call the scorer. Raises: Internal: it has failed, with what it said; or what it raises of ours."""
        try:
            outcomes = self._scorer.score(samples)
        except TandemError:
            raise
        except Exception as error:  # of code that is not ours
            raise Internal(f"{self._scorer.name}: {type(error).__name__}: {error}") from error
        if len(outcomes) != len(samples):
            raise Internal(f"{self._scorer.name} returned {len(outcomes)} outcomes for {len(samples)} samples")
        return outcomes


def _sample(message: reward_pb2.Sample) -> RewardSample:
    try:
        columns = json.loads(message.columns_json or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"columns_json of {message.sample_id} is not JSON: {error}") from error
    if not isinstance(columns, dict):
        raise InvalidRequest(f"columns_json of {message.sample_id} is a {type(columns).__name__}, not an object")
    return RewardSample(
        sample_id=message.sample_id,
        group=message.group,
        prompt=message.prompt,
        completion=message.completion,
        answer=message.answer,
        columns=columns,
        num_tokens=message.num_tokens,
        truncated=message.truncated,
        prompt_token_ids=message.prompt_token_ids,
        completion_token_ids=message.completion_token_ids,
    )


def _score(sample_id: str, outcome: Outcome) -> reward_pb2.Score:
    if isinstance(outcome, NotScored):
        return reward_pb2.Score(sample_id=sample_id, error=outcome.why or "the scorer gave no reason")
    if isinstance(outcome, SampleScore):
        return reward_pb2.Score(sample_id=sample_id, value=outcome.value, parts=outcome.parts)
    return reward_pb2.Score(sample_id=sample_id, value=outcome)
