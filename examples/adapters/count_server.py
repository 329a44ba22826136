"""A server of OpenEnv: an environment that counts up to a number by steps that are no more than three."""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class By(Action):
    """How far to count."""

    by: int = Field(ge=1, le=3)


class Count(Observation):
    """Where it is."""

    text: str


class Counting(Environment[By, Count, State]):
    """Rewards arriving at the number; beyond it there is nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, to: int = 10, **kwargs: object) -> Count:
        self.at, self.to = (seed or 0) % 3, to
        return Count(text=f"Count from {self.at} to {self.to}", done=False, reward=None)

    def step(self, action: By, timeout_s: float | None = None, **kwargs: object) -> Count:
        self.at += action.by
        return Count(text=f"at {self.at}", done=self.at >= self.to, reward=1.0 if self.at == self.to else 0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.at)


if __name__ == "__main__":
    app = create_fastapi_app(Counting, By, Count, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
