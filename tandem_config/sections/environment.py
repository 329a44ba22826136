"""What answers the policy between its turns: a user's environment, or tools that it may call (docs/environments.md).

environment: {function: my_env.py:Env, args: {depth: 3}}

environment: {tools: [my_tools.py:search, my_tools.py:add]}

environment: {address: "127.0.0.1:50071"}
"""

from typing import Literal

from pydantic import JsonValue, ValidationInfo, field_validator, model_validator

from tandem_config.sections.base import Fraction, ListOf, PositiveInt, Section, setting
from tandem_config.sections.reward import CodeReference, Workers, checked_reference
from tandem_config.sections.rewards.base import Timeout, wrong
from tandem_config.sections.rewards.servers import Security, checked_address


class EnvironmentSection(Section):
    """Turns of an episode: your environment, or tools that the policy may call; null: one turn
    (docs/environments.md)."""

    function: CodeReference | None = setting(None, "tools need no class")
    """FILE.py:CLASS, the file relative to this one, or package.module:CLASS: your environment. Either this, tools or
    address."""
    args: dict[str, JsonValue] = setting(factory=dict, why="most environments need none")
    """Values for parameters of the class's constructor, by name."""
    tools: ListOf[CodeReference] = setting((), "an environment answers by itself")
    """Functions that the policy may call, each FILE.py:FUNCTION or package.module:FUNCTION."""
    address: str | None = setting(None, "most environments run beside the coordinator")
    """Of a server that has the environment or the tools: host:port, or unix:/path.sock."""
    security: Security = setting("run", "a server that is started with the run has what the run has")
    """run: as a service of the run is called, with its certificate (the server's must be for the role `environment`)
    and its token, where it has them; none: plain, without either, for a server of others."""
    max_turns: PositiveInt = setting(8, "an episode that does not end by itself costs no more", "turns")
    """Most turns of the policy in an episode."""
    turn_timeout_s: Timeout = setting(60.0, "a search, a program that is run", "s")
    """Seconds for a call of the environment, or for all calls of tools in a turn; with address, for the server's reply,
    its queue included; the server has a limit of its own."""
    episode_timeout_s: Timeout = setting(600.0, "ten turns that take all of their time", "s")
    """Seconds for an episode, from its reset to its end, without its waits for a worker that is busy with others; with
    address those count."""
    history: Literal["template", "keep"] = setting(
        "template", "the policy is used with its chat template, which leaves out earlier thinking"
    )
    """What a turn behind a user's message reads. template: the chat template's own text of the conversation; where that
    is not what was said (thinking that it leaves out), a branch begins. keep: every token so far, as behind the answers
    of tools."""
    on_error: Literal["zero", "drop", "stop"] = setting(
        "drop", "what breaks an environment is more often itself than the policy"
    )
    """What an episode gets whose environment failed. zero: the reward 0; drop: no reward at all, so that it is left out
    of its group's statistics and of training; stop: the run ends. Counted in any case."""
    max_error_share: Fraction = setting(
        0.5, "an environment of one's own may fail often, one that mostly fails must not train", "share"
    )
    """Share of a batch's episodes whose environment may fail; above it the run ends."""
    start_timeout_s: Timeout = setting(120.0, "large libraries on a busy machine", "s")
    """Seconds for importing the files, once in each of the workers; with address, for a server that does not answer,
    also later, when an episode waits for it."""
    workers: Workers = setting(2, "a hang or a crash stops one of them only", "processes")
    """Processes of the coordinator that hold the episodes; code that is not `async def` uses a core of each. With
    address the server has its own."""
    memory_mib: int = setting(4096, "one episode must not take the coordinator with it", "MiB", ge=64)
    """Memory that each of the workers may allocate; beyond it Python raises MemoryError."""

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.address or ("tools" if self.function is None else self.function.rpartition(":")[2])

    @field_validator("function", "tools")
    @classmethod
    def _are_references(
        cls, value: CodeReference | tuple[CodeReference, ...] | None, info: ValidationInfo
    ) -> CodeReference | tuple[CodeReference, ...] | None:
        example = "my_env.py:Env" if info.field_name == "function" else "my_tools.py:search"
        for reference in () if value is None else (value,) if isinstance(value, str) else value:
            checked_reference(reference, example)
        return value

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        return None if address is None else checked_address(address, "environment-server")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "EnvironmentSection":
        given = [name for name in ("function", "tools", "address") if getattr(self, name)]
        if len(given) != 1:
            which = f"both {given[0]} and {given[1]}" if given else "neither function, tools nor address"
            raise wrong(f"has {which}", "name a class as function:, functions as tools:, or a server as address:")
        if self.args and self.function is None:
            why = "tools do not get" if self.tools else "the server has itself"
            raise wrong(f"has args, which {why}", "leave args out, or write a class as function:")
        return self
