"""A reward that a language model gives, at an OpenAI-compatible endpoint: a prompt per completion, a score back."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import httpx
from jinja2 import Environment, StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.rewards.base import Reward, ScoredText, Scores, TakenColumns
from coordinator.rewards.servers.calls import CallFailed, CallFailedForNow, FailureBudget, ServerCalls
from tandem_config.sections.rewards.servers import JudgeReward

# Statuses that may pass: late, in conflict, too busy, and all that are the server's own fault.
_PASSING = (408, 409, 425, 429)
_SHOWN_CHARS = 200
_ASK_S, _PAUSE_S = 10.0, 0.5
_PATH = "/chat/completions"


class JudgedScores(Reward):
    """Asks a judge about each completion.

    Args:
        environ: holds the key.
    """

    def __init__(self, section: JudgeReward, environ: Mapping[str, str] = os.environ) -> None:
        self._section = section
        self._environ = environ
        self._calls = ServerCalls(section.url, section)
        templates = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._template = templates.from_string(section.prompt)
        self._pattern = re.compile(section.pattern)
        self._scores = {text.casefold(): score for text, score in (section.scores or {}).items()}
        self._key = ""
        self._client: httpx.AsyncClient | None = None

    @property
    def takes(self) -> TakenColumns:
        """The columns that the prompt names."""
        return columns_in(self._section.prompt)

    async def start(self, columns: Sequence[str]) -> None:
        """Read the key, and wait until the endpoint answers."""
        if self._section.api_key_env is not None:
            self._key = self._environ.get(self._section.api_key_env, "").strip()
            if not self._key:
                raise ValueError(
                    f"environment variable {self._section.api_key_env} is not set in the coordinator; api_key_env says "
                    f"that it holds the key of {self._section.url}"
                )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self._section.concurrency)
        self._client = httpx.AsyncClient(headers=headers, timeout=self._section.timeout_s, limits=limits)
        await self._wait_for_endpoint(self._client)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        budget = FailureBudget(self._section, len(items))
        found = await asyncio.gather(*(self._judged(item, budget) for item in items))
        return Scores(
            values=[value if isinstance(value, float) else 0.0 for value in found],
            errors={place: value for place, value in enumerate(found) if isinstance(value, str)},
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _wait_for_endpoint(self, client: httpx.AsyncClient) -> None:
        """Ask for the models until there is an answer. Raises: ValueError: none in time, or the key is refused."""
        why = "it did not answer"
        try:
            async with asyncio.timeout(self._section.start_timeout_s):
                while True:
                    try:
                        answer = await client.get(f"{self._section.url}/models", timeout=_ASK_S)
                    except httpx.HTTPError as error:
                        why = self._hidden(_why(error))
                    else:
                        why = f"status {answer.status_code}: {self._quoted(answer)}"
                        if answer.status_code in (401, 403):
                            raise ValueError(f"{self._section.url} refuses the key of this run (api_key_env): {why}")
                        if not _passing(answer.status_code):  # some endpoints have no such list
                            return
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise ValueError(
                f"no endpoint at {self._section.url} within start_timeout_s = "
                f"{self._section.start_timeout_s:g} s: {why}"
            ) from None

    async def _judged(self, item: ScoredText, budget: FailureBudget) -> float | str:
        """Return the score of a completion, or why it has none."""
        found = await self._asked(item, budget)
        if isinstance(found, str):
            budget.spend(1)
        return found

    async def _asked(self, item: ScoredText, budget: FailureBudget) -> float | str:
        try:
            request = self._request(item)
        except TemplateError as error:
            return f"prompt: {error}; it has prompt, completion, answer and columns"
        try:
            return self._read(await self._calls.call(lambda: self._send(request), budget))
        except CallFailed as error:
            return str(error)

    def _request(self, item: ScoredText) -> dict[str, Any]:
        """Make the body of a request. Raises: TemplateError: the template needs what the row does not have."""
        prompt = self._template.render(
            prompt=item.prompt,
            completion=item.completion,
            answer=item.answer,
            columns=item.columns,
            truncated=item.truncated,
            num_tokens=item.num_tokens,
        )
        system = [{"role": "system", "content": self._section.system}] if self._section.system else []
        return {
            **self._section.body,
            "model": self._section.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": self._section.temperature,
            "max_tokens": self._section.max_answer_tokens,
        }

    async def _send(self, request: Mapping[str, Any]) -> str:
        """Return the judge's answer. Raises: CallFailed, CallFailedForNow."""
        assert self._client is not None, "score() before start()"
        try:
            async with asyncio.timeout(self._section.timeout_s):
                response = await self._client.post(f"{self._section.url}{_PATH}", json=request)
        except TimeoutError:
            raise CallFailedForNow(
                f"{self._section.url}: no answer in timeout_s = {self._section.timeout_s:g} s"
            ) from None
        except httpx.HTTPError as error:
            raise CallFailedForNow(f"{self._section.url}: {self._hidden(_why(error))}") from None
        if response.status_code != 200:
            why = f"{self._section.url}: status {response.status_code}: {self._quoted(response)}"
            if _passing(response.status_code):
                raise CallFailedForNow(why, retry_after_s(response.headers.get("retry-after", "")))
            raise CallFailed(why)
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise CallFailed(f"{self._section.url}: no choices[0].message.content in its answer") from None
        return content if isinstance(content, str) else ""

    def _read(self, answer: str) -> float:
        """Return the score in a judge's answer. Raises: CallFailed: there is none; its text is not quoted."""
        matches = list(self._pattern.finditer(answer))
        if not matches:
            raise CallFailed(f"the judge's answer of {len(answer)} characters has no match of pattern")
        text = (matches[-1][1] or "").strip()
        if self._scores:
            score = self._scores.get(text.casefold())
            if score is None:
                raise CallFailed(f"the judge said {text[:_SHOWN_CHARS]!r}, which is not in scores")
            return float(score)
        try:
            number = float(text)
        except ValueError:
            raise CallFailed(f"the judge said {text[:_SHOWN_CHARS]!r}, which is no number") from None
        if not 0 <= number <= self._section.full_score:
            raise CallFailed(
                f"the judge said {number:g}, which is not from 0 to full_score = {self._section.full_score:g}"
            )
        return number / self._section.full_score

    def _quoted(self, response: httpx.Response) -> str:
        return self._hidden(" ".join(response.text.split())[:_SHOWN_CHARS])

    def _hidden(self, text: str) -> str:
        """Return a text without the key, which some endpoints repeat when they refuse it."""
        return text.replace(self._key, "***") if self._key else text


def columns_in(prompt: str) -> TakenColumns:
    """Return the columns that a template names.

    >>> columns_in("{{ columns.level }} {{ columns['hint'] }} {{ answer }}").optional
    ('level', 'hint')
    >>> columns_in("{{ columns | tojson }}").everything
    True
    """
    tree = Environment(autoescape=False).parse(prompt)
    names: dict[int, object] = {id(access.node): access.attr for access in tree.find_all(nodes.Getattr)}
    names |= {id(access.node): getattr(access.arg, "value", None) for access in tree.find_all(nodes.Getitem)}
    taken = [names.get(id(name)) for name in tree.find_all(nodes.Name) if name.name == "columns"]
    # For a name that a dict has, as `items`, the template gets the method.
    found = tuple(name for name in taken if isinstance(name, str) and not hasattr(dict, name))
    return TakenColumns(optional=found, everything=len(found) < len(taken))


def _passing(status: int) -> bool:
    return status in _PASSING or status >= 500


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def retry_after_s(header: str) -> float:
    """Read a Retry-After header: seconds, or a date; 0.0 if there is none, or it says nothing.

    >>> retry_after_s("7"), retry_after_s(""), retry_after_s("soon"), retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT")
    (7.0, 0.0, 0.0, 0.0)
    """
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (TypeError, ValueError):
        return 0.0
