"""A reward of one's own as a service: 1 for the right last number, and a little more for short completions.

    TANDEM_GRPC_PORT=50061 python examples/reward_server/server.py

and in the run's configuration

    reward: {kind: remote, address: "127.0.0.1:50061", security: none}
"""

import re
import sys
from collections.abc import Sequence

from reward_service import NotScored, RewardSample, RewardScorer, SampleScore, run_reward_server

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FULL_TOKENS = 32


class LastNumber(RewardScorer):
    """Compares the completion's last number with the answer's."""

    name = "last-number"
    version = "1"
    max_batch_size = 256

    def score(self, samples: Sequence[RewardSample]) -> list[SampleScore | NotScored]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: RewardSample) -> SampleScore | NotScored:
        wanted = _NUMBER.findall(sample.answer)
        if not wanted:
            return NotScored(f"the answer of {sample.sample_id} has no number")
        found = _NUMBER.findall(sample.completion)
        right = float(bool(found) and float(found[-1]) == float(wanted[-1]))
        short = min(1.0, _FULL_TOKENS / max(1, sample.num_tokens))
        return SampleScore(value=right * (0.9 + 0.1 * short), parts={"right": right, "short": short})


if __name__ == "__main__":
    sys.exit(run_reward_server(LastNumber))
