"""Gymnasium: an environment whose observations are written as text, and whose actions are read from the turns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.environments.adapters import library, user
from coordinator.workers.episodes.replies import AssistantTurn, Message

gymnasium = library("gymnasium", "gymnasium")
spaces = gymnasium.spaces

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """An environment by its id.

    Args:
        id: as gymnasium.make takes it; `package:id` imports the package first.
        make: other arguments of gymnasium.make. With `render_mode: ansi` a message is what is rendered.
        actions: names of a Discrete space's actions, from its first one; None: its integers.
        invalid_reward: of a turn without a valid action, which is no step of the environment.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        invalid_reward: float = 0.0,
    ) -> None:
        self._environment = gymnasium.make(id, **(make or {}))
        self._invalid_reward = invalid_reward
        space = self._space = self._environment.action_space
        if not isinstance(space, spaces.Discrete | spaces.Text):
            raise ValueError(f"{id} has the action space {space}; Discrete and Text can be read from a turn")
        if actions is None and isinstance(space, spaces.Discrete):
            actions = [str(space.start + place) for place in range(space.n)]
        if actions is not None and len(actions) != getattr(space, "n", 0):
            raise ValueError(f"actions: {len(actions)} names, and {id} has the action space {space}")
        self._actions = [name.lower() for name in actions or ()]

    @classmethod
    def check_args(cls, **args: Any) -> None:
        """Build one and close it. Raises: ValueError, gymnasium.error.Error, TypeError."""
        cls(**args).close()

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin; the seed is Gymnasium's too."""
        observation, _ = self._environment.reset(seed=seed % 2**31)
        return user(self._text(observation))

    def step(self, turn: AssistantTurn) -> tuple[list[Message], float, bool]:
        """Take the action that the turn names last; a turn without one is answered with what there is to choose."""
        action = self._action(str(turn.message["content"] or "").strip())
        if action is None:
            wanted = ", ".join(self._actions) if self._actions else str(self._space)
            return user(f"That is no valid action. Answer with one of: {wanted}"), self._invalid_reward, False
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        done = bool(terminated or truncated)
        return [] if done else user(self._text(observation)), float(reward), done

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _text(self, observation: Any) -> str:
        if self._environment.render_mode == "ansi":
            return _ESCAPES.sub("", self._environment.render()).strip()
        return _written(observation)

    def _action(self, text: str) -> Any:
        """Read an action. Returns: None: there is none that the space contains."""
        if not self._actions:
            return text if self._space.contains(text) else None
        names = "|".join(map(re.escape, sorted(self._actions, key=len, reverse=True)))
        found = re.findall(rf"(?<![\w-])(?:{names})(?!\w)", text.lower())
        return self._space.start + self._actions.index(found[-1]) if found else None


def _written(observation: Any) -> str:
    """Write an observation: a line for each part of a dict, arrays as nested lists."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_written(part)}" for name, part in observation.items())
    if isinstance(observation, tuple):
        observation = list(observation)
    plain = observation.tolist() if hasattr(observation, "tolist") else observation
    return str(plain)
