"""Step 4: groups to rewards. Decodes completions, scores them, and limits how many scores may fail."""

from collections.abc import Sequence

import numpy as np

from coordinator.flow import Group, Scored
from coordinator.learn.rewards.base import Reward, ScoredText, Scores
from coordinator.learn.rewards.work import MAX_LATE_SHARE, late_budget
from servicekit.errors import Internal
from tandem_files.tokenizer import TextCodec

# Share of an iteration's samples whose scoring may fail (each counts as 0) before the run stops: a few odd texts must
# not end a run, and a broken reward must not train on zeros.
MAX_ERROR_SHARE = 0.05
_PART = "reward"


class Scorer:
    """Scores groups with one reward."""

    def __init__(self, *, reward: Reward, codec: TextCodec, weight: float) -> None:
        self._reward = reward
        self._codec = codec
        self._weight = weight

    async def score(self, groups: Sequence[Group]) -> Scored:
        """Score P groups of G completions each. Returns: [P, G] rewards, and counts of failed scores.

        Raises: Internal: scoring failed for more than 5 % of the samples, or took too long for more than 25 %.
        """
        texts = self._codec.decode(c.token_ids for group in groups for c in group.completions)
        owners = [group.prompt.row for group in groups for _ in group.completions]
        answers = [(group.prompt.answer, c.truncated) for group in groups for c in group.completions]
        scores = await self._reward.score(
            [
                ScoredText(completion=text, answer=answer, truncated=truncated)
                for text, (answer, truncated) in zip(texts, answers, strict=True)
            ]
        )
        _check_budget(scores, len(texts))
        values = np.array(scores.values, dtype=np.float64)
        scores_PG = values.reshape(len(groups), -1)
        return Scored(
            rewards_PG=self._weight * scores_PG,
            accuracy=float(values.mean()),
            accuracy_part=_PART,
            parts={_PART: scores_PG},
            num_errors=scores.num_errors,
            first_error=scores.first_error,
            num_timeouts=scores.num_timeouts,
            num_unreadable=len(scores.unreadable),
            unreadable_rows={owners[place]: why for place, why in scores.unreadable.items()},
        )


def _check_budget(scores: Scores, total: int) -> None:
    if scores.num_errors > MAX_ERROR_SHARE * total:
        raise Internal(
            f"scoring failed for {scores.num_errors} of {total} completions, more than {MAX_ERROR_SHARE:.0%}; "
            f"first failure: {scores.first_error}"
        )
    if scores.num_timeouts > late_budget(total):
        raise Internal(
            f"scoring took longer than reward.timeout_s for {scores.num_timeouts} of {total} completions (the rest was "
            f"not tried), more than {MAX_LATE_SHARE:.0%}: simplify reward.pattern (quantifiers within quantifiers "
            "take exponential time), or raise reward.timeout_s and reward.workers"
        )
