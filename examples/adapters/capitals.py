"""A task set of verifiers: capitals, which a tool knows; a reward for the answer, and one for asking the tool."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Capitals"]

CAPITALS = {"Norway": "Oslo", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo"}


class Capital(vf.TaskData):
    """A question's answer."""

    capital: str


class AtlasConfig(vf.SharedToolsetConfig):
    """No settings."""


class Atlas(vf.Toolset[AtlasConfig]):
    """A server of one tool, which all episodes of a process share."""

    TOOL_PREFIX = None

    @vf.tool
    async def look_up(self, country: str) -> str:
        """Look up the capital of a country."""
        return CAPITALS.get(country, "no such country")


class NameCapital(vf.Task[Capital]):
    """A question; the policy may ask the atlas first."""

    @vf.reward
    async def right(self, task: Capital, trace: vf.Trace) -> float:
        return float(task.capital in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def asked(self, trace: vf.Trace) -> float:
        return float(any(message.role == "tool" for message in trace.messages))


class Capitals(vf.Taskset[NameCapital]):
    """A question for each country."""

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Atlas(AtlasConfig())]

    def load(self) -> Iterator[NameCapital]:
        for country, capital in CAPITALS.items():
            prompt = f"What is the capital of {country}?"
            yield NameCapital(Capital(name=country, prompt=prompt, capital=capital), self.config.task)


if __name__ == "__main__":
    Atlas.run()
