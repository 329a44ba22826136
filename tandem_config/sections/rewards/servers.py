"""Rewards that a server gives: a RewardService, or a language model that judges (docs/remote-rewards.md)."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import JsonValue, ValidationInfo, field_validator

from servicekit.addresses import split_address
from tandem_config.sections.base import PositiveFloat, PositiveInt, setting
from tandem_config.sections.rewards.base import FailureSection, Timeout, compiled, wrong

_SOCKET = re.compile(r"unix:/.+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Security = Literal["run", "none"]
# Fields of a request that have a setting of their own, or that the answer's reader cannot do without.
_OWN_FIELDS = ("messages", "model", "temperature", "max_tokens", "stream", "n")


def checked_address(address: str, example: str) -> str:
    """Return an address, host:port or unix:/path.sock, for a validator; raises the error of what is none."""
    if not _SOCKET.fullmatch(address):
        try:
            split_address(address)
        except ValueError:
            advice = f"host:port without a scheme, e.g. {example}:50051 or [fd00::5]:50051, or unix:/path.sock"
            raise wrong("is no address", advice) from None
    return address


class ServerSection(FailureSection):
    """A reward for which a server is called."""

    require_stop: bool = setting(False, "the server sees `truncated`, and 0 need not be the worst score")
    """Score completions that were cut off by the length limit 0, without a call."""
    timeout_s: Timeout = setting(60.0, "a large model's forward pass on a batch, a judge that reasons", "s")
    """Seconds for a call; one that takes longer is repeated, as `retries` says."""
    concurrency: PositiveInt = setting(8, "enough to keep a server busy; its own queue is not filled", "calls")
    """Calls at a time."""
    retries: int = setting(7, "30 s at least: a server that restarts is back by then", "calls", ge=0, le=100)
    """Repetitions of a call that failed for a reason that may pass (unreachable, late, too busy), after 0.5 s, 1 s, 2
    s, ... 30 s or down to half of that, or as long as the server asks for."""
    open_after: PositiveInt = setting(3, "a server that is down is not waited for by every batch", "calls")
    """Calls in a row that must fail, retries included, for the circuit to open: then nothing is sent for open_s, and
    what would be sent fails immediately; then one call tries."""
    open_s: PositiveFloat = setting(15.0, "a server that is back is noticed soon, one that is down is left alone", "s")
    """Seconds for which an open circuit stays open."""
    start_timeout_s: Timeout = setting(120.0, "a reward model that is started with the run is loaded by then", "s")
    """Seconds that a starting run waits for the server."""


class RemoteReward(ServerSection):
    """What a server says that speaks `protos/tandem_api/reward/v1` (docs/remote-rewards.md)."""

    kind: Literal["remote"] = setting(..., "chosen by name")
    """Kind of reward."""
    address: str = setting(..., "no default: it is yours")
    """Of the server: host:port, or unix:/path.sock."""
    security: Security = setting("run", "a server that is started with the run has what the run has")
    """run: as a service of the run is called, with its certificate (the server's must be for the role `reward`) and its
    token, where it has them; none: plain, without either, for a server of others."""
    batch_size: PositiveInt = setting(
        32, "enough for a model's forward pass; a call that fails costs no more", "samples"
    )
    """Most completions in a call; the server may set a lower limit."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        return checked_address(address, "reward-server")


class JudgeReward(ServerSection):
    """What a language model says of the completion, asked by an OpenAI-compatible endpoint (docs/remote-rewards.md)."""

    kind: Literal["judge"] = setting(..., "chosen by name")
    """Kind of reward."""
    url: str = setting(..., "no default: it is yours")
    """Base of the endpoint, before /chat/completions, e.g. http://127.0.0.1:30000/v1."""
    model: str = setting(..., "no default: it is the endpoint's")
    """Name of the model at the endpoint."""
    prompt: str = setting(..., "no default: it depends on the task")
    """What the judge is asked: a Jinja template of prompt, completion, answer and columns."""
    system: str = setting("", "the prompt can say it all")
    """System message; empty: none."""
    pattern: str = setting(
        r"(?i)score\s*:\s*(-?\d+(?:\.\d+)?)", "a judge that reasons before it answers ends with its score"
    )
    """Python regular expression, searched in the judge's answer; group 1 of the last match counts."""
    scores: dict[str, float] | None = setting(None, "numbers need no table")
    """Score of each text that group 1 may be, in any case of letters, e.g. {yes: 1, no: 0}; null: it is a number from 0
    to full_score."""
    full_score: PositiveFloat = setting(10.0, "scales of ten points are common", "points")
    """The judge's best number, which is the score 1."""
    temperature: float = setting(0.0, "the same completion gets the same score, as far as the endpoint can", ge=0, le=2)
    """Sampling temperature of the judge."""
    max_answer_tokens: PositiveInt = setting(1024, "room for some reasoning", "tokens")
    """Most tokens of the judge's answer; one that is cut off before its score fails."""
    body: dict[str, JsonValue] = setting(factory=dict, why="most endpoints need none")
    """Further fields of the request, e.g. {chat_template_kwargs: {enable_thinking: false}}."""
    api_key_env: str | None = setting(None, "a key is in no file of a run")
    """Environment variable with the endpoint's key; null: it needs none."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong("is no URL", "e.g. http://127.0.0.1:30000/v1")
        if parts.username or parts.password or parts.query:
            advice = "put the key into a variable, and name that in api_key_env"
            raise wrong("must not hold credentials or a query", advice, secret=True)
        return url.rstrip("/")

    @field_validator("prompt")
    @classmethod
    def _is_a_template(cls, prompt: str) -> str:
        from jinja2 import TemplateSyntaxError  # takes 50 ms, and most runs have no judge
        from jinja2.sandbox import SandboxedEnvironment

        try:
            SandboxedEnvironment().parse(prompt)
        except TemplateSyntaxError as error:
            raise wrong(f"is not a Jinja template: line {error.lineno}: {error.message}") from error
        if "completion" not in prompt:
            raise wrong("does not show the judge the completion", "write {{ completion }} where it belongs")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        if re.compile(compiled(pattern)).groups < 1:
            raise wrong("has no group", "put the part that is the score in parentheses, e.g. 'score: (\\d+)'")
        return pattern

    @field_validator("scores")
    @classmethod
    def _is_not_empty(cls, scores: dict[str, float] | None) -> dict[str, float] | None:
        if scores is not None and not scores:
            raise wrong("is empty", "e.g. {yes: 1, no: 0}")
        return scores

    @field_validator("full_score")
    @classmethod
    def _is_read(cls, full_score: float, info: ValidationInfo) -> float:
        if info.data.get("scores") and full_score != cls.model_fields["full_score"].default:
            raise wrong("does nothing beside scores", "leave it out")
        return full_score

    @field_validator("body")
    @classmethod
    def _sets_nothing_twice(cls, body: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in _OWN_FIELDS:
            if name in body:
                raise wrong(f"sets {name}, which another setting or the run itself sets", "leave it out")
        return body

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is None or _VARIABLE.fullmatch(name):
            return name
        raise wrong("must be the name of a variable, not the key itself", "e.g. JUDGE_API_KEY", secret=True)
