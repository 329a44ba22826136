"""A request to the fake cluster, taken apart, and what a caller may do: RBAC, and faults that tests ask for."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from launcher.deploy.running.kinds import Kind
from tests.fakes.cluster.store import Key, Object, changed, refusal

COORDINATOR, OPERATOR = "coordinator", "operator"
_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
# Of each user; kubectl sends none where there is no TLS, and is the operator's.
TOKENS = {OPERATOR: "operator-token", COORDINATOR: "coordinator-token"}


class Request(NamedTuple):
    """A request for objects. verb: as RBAC spells it; name "": all of a kind, or, for `create`, that of the body."""

    user: str
    verb: str
    kind: Kind
    namespace: str
    name: str
    sub: str
    query: dict[str, str]
    content_type: str
    body: Object

    @property
    def resource(self) -> str:
        """As RBAC spells it: `pods/eviction`."""
        return f"{self.kind.plural}/{self.sub}" if self.sub else self.kind.plural

    @property
    def what(self) -> str:
        """As `seen` and the faults have it."""
        return f"{self.verb} {self.resource}"

    @property
    def key(self) -> Key:
        return self.kind.name, self.namespace, self.name


class Gate:
    """What is refused before the objects are looked at.

    The operator may do everything, others what `bind` allows them. `seen` counts requests by "verb resource"; `tokens`
    are those of the users.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.tokens = dict(TOKENS)
        self._rules: dict[str, list[Object]] = {}
        self._refused: dict[str, str] = {}
        self._throttled: Counter[str] = Counter()
        self._conflicts: Counter[str] = Counter()
        self._retry_after_s = 1

    def bind(self, rules: Sequence[Object], user: str = COORDINATOR) -> None:
        """Allow a user what these rules of a Role say, and nothing else."""
        self._rules[user] = list(rules)
        self.tokens.setdefault(user, f"{user}-token")

    def refuse(self, *what: str, message: str = "") -> None:
        """Forbid "create pods/eviction" to everyone from now on; "patch statefulsets/scale rollout": of that one.

        message: an admission webhook's, instead of RBAC's.
        """
        if wrong := [each for each in what if each.split(" ")[0] not in _VERBS]:
            raise ValueError(f"no verb and resource: {wrong}")
        self._refused |= dict.fromkeys(what, message)

    def throttle(self, what: str, times: int, retry_after_s: int = 1) -> None:
        """The next requests of a kind are answered 429 with Retry-After."""
        self._throttled[what], self._retry_after_s = times, retry_after_s

    def conflict(self, what: str, times: int) -> None:
        """The next requests of a kind come too late: 409."""
        self._conflicts[what] = times

    def is_allowed(self, user: str, verb: str, resource: str, group: str, name: str) -> bool:
        """Whether RBAC allows it."""
        if self._refused.keys() & {f"{verb} {resource}", f"{verb} {resource} {name}"}:
            return False
        return user == OPERATOR or any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules.get(user, [])
        )

    def enter(self, request: Request) -> None:
        """Raises: Refusal: 403, 429, 409."""
        what, name, plural = request.what, request.name, request.kind.plural
        self.seen[what] += 1
        group = request.kind.api_version.rpartition("/")[0]
        if not self.is_allowed(request.user, request.verb, request.resource, group, name):
            text = f'User "{request.user}" cannot {request.verb} resource "{request.resource}" in API group "{group}"'
            text = self._refused.get(what) or f'{text} in the namespace "{request.namespace}"'
            raise refusal(403, "Forbidden", f'{plural} "{name}" is forbidden: {text}')
        if self._throttled[what] > 0:
            self._throttled[what] -= 1
            text = "the server has received too many requests and has asked us to try again later"
            raise refusal(429, "TooManyRequests", text, headers={"Retry-After": str(self._retry_after_s)})
        if self._conflicts[what] > 0:
            self._conflicts[what] -= 1
            raise changed(plural, name)
