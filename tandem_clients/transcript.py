"""What was said in an episode of several turns; a type of flow.py's."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Transcript:
    """An episode of several turns, as its messages.

    Attributes:
        messages: after the prompt: the policy's, and the environment's.
        rewards: what the environment gave for each of the policy's turns; None: nothing.
        end: why it has ended: "done", or max_turns, max_tokens, timeout (it is truncated then), or failed.
        error: what failed; "": nothing.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    end: str = ""
    error: str = ""

    @property
    def num_turns(self) -> int:
        """The number of turns of the policy."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def reward(self) -> float | None:
        """The sum of what the turns got; None: none got any."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) if given else None
