"""TextArena: a game that the policy plays alone, or against players that are functions."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordinator.environments.adapters import library, user
from coordinator.workers.episodes.replies import AssistantTurn, Message
from coordinator.workers.own_code import find_code, import_code
from tandem_config.sections.reward import split_reference

textarena = library("textarena", "textarena")


class TextArena:
    """A game by its id.

    Args:
        id: as textarena.make takes it.
        make: other arguments of textarena.make.
        players: how many there are.
        player: the number of the policy's, from 0.
        opponent: FILE.py:FUNCTION or package.module:FUNCTION; it gets what another player sees, and returns its move.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: str | None = None,
    ) -> None:
        if players > 1 and opponent is None:
            raise ValueError(f"{players} players: name a function as opponent, which plays the others")
        self._game = textarena.make(id, **(make or {}))
        self._players, self._player = players, player
        self._opponent: Callable[[str], str] | None = None
        if opponent is not None:
            place, name = split_reference(opponent)
            self._opponent = find_code(import_code(place, None)[0], name, place)
        # Games draw from Python's own generator: each has its state, whichever other games of the process are played.
        self._drawn = random.getstate()

    @classmethod
    def check_args(cls, **args: Any) -> None:
        """Build a game and begin it. Raises: whatever TextArena does."""
        cls(**args).reset({}, 0)

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin a game; moves of others that come first are taken."""
        self._drawn = random.Random(seed).getstate()
        with self._drawing():
            self._game.reset(num_players=self._players, seed=seed)
            self._play_others()
            return user(self._seen())

    def step(self, turn: AssistantTurn) -> tuple[list[Message], float | None, bool]:
        """Take the policy's move, and those of the others until its next one. The reward is the game's, at its end."""
        with self._drawing():
            done, _ = self._game.step(str(turn.message["content"] or ""))
            if not done and not self._play_others():
                return user(self._seen()), None, False
            return [], float((self._game.state.rewards or {}).get(self._player, 0.0)), True

    def _play_others(self) -> bool:
        """Take moves of the others. Returns: whether the game has ended."""
        while self._opponent is not None and self._game.state.current_player_id != self._player:
            done, _ = self._game.step(self._opponent(self._seen()))
            if done:
                return True
        return False

    def _seen(self) -> str:
        """Return what the current player has not seen yet, but for its own moves."""
        game = self._game
        while isinstance(game, textarena.Wrapper):  # they repeat the whole game each time
            game = game.env
        player, news = game.get_observation()
        return "\n".join(text for sender, text, _ in news if sender != player) or "It is your turn."

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._drawn)
        try:
            yield
        finally:
            self._drawn = random.getstate()
            random.setstate(before)
