"""The policy term of the loss, by the name in `grpo.objective`: one file each."""

from collections.abc import Callable, Mapping

from tandem_config.schema import GrpoSection
from trainer_service.objectives.policy import cispo, grpo, gspo
from trainer_service.objectives.tokens import TokenLoss, Tokens

OBJECTIVES: Mapping[str, Callable[[Tokens, GrpoSection], TokenLoss]] = {
    "grpo": grpo.token_loss,
    "gspo": gspo.token_loss,
    "cispo": cispo.token_loss,
}
