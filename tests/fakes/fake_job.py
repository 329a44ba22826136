"""A FAKE Job controller for tests: what becomes of a Job when its pod ends, by backoffLimit and podFailurePolicy.

It knows Jobs without `completions` and with restartPolicy Never, makes no pods, and waits no back-off. As Kubernetes it
counts failures over the Job's whole life, makes no pod any more once one has succeeded, and is complete when none is
left. Nothing that passes here has run on Kubernetes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Manifest = Mapping[str, Any]
End = Literal["", "Complete", "BackoffLimitExceeded", "PodFailurePolicy"]


class FakeJob:
    """A Job as `kubectl apply` takes it.

    Attributes:
        failed: status.failed.
        active: pods that run.
        ended: "" while it goes on, else "Complete" or the reason of its condition Failed.
    Raises: ValueError: what an API server refuses.
    """

    def __init__(self, manifest: Manifest) -> None:
        spec = manifest["spec"]
        self._limit = int(spec.get("backoffLimit", 6))
        self._rules = spec.get("podFailurePolicy", {}).get("rules", [])
        pod = spec["template"]["spec"]
        if self._rules and pod["restartPolicy"] != "Never":
            raise ValueError("podFailurePolicy: only with restartPolicy Never")
        for rule in self._rules:
            _check(rule, {container["name"] for container in pod["containers"]})
        self._container = pod["containers"][0]["name"]
        if "completions" in spec:
            raise ValueError("a number of completions is not known here")
        self.failed, self.active = 0, int(spec.get("parallelism", 1))
        self._has_succeeded = False
        self.ended: End = ""

    def pod_ended(self, exit_code: int, conditions: Iterable[str] = ()) -> bool:
        """Take the end of a pod. conditions: those that are True. Returns: whether another pod is made."""
        assert not self.ended
        action = "Count" if exit_code else "Complete"
        if exit_code:
            matching = (rule["action"] for rule in self._rules if self._matches(rule, exit_code, set(conditions)))
            action = next(matching, "Count")
        if action == "Complete":
            self._has_succeeded = True
        elif action == "FailJob":
            self.failed += 1
            self.ended = "PodFailurePolicy"
        elif action == "Count":
            self.failed += 1
            self.ended = "BackoffLimitExceeded" if self.failed > self._limit else ""
        is_made_again = not self.ended and not self._has_succeeded
        self.active -= not is_made_again
        if not self.active and not self.ended:
            self.ended = "Complete"
        return is_made_again

    def _matches(self, rule: Manifest, exit_code: int, conditions: set[str]) -> bool:
        if "onPodConditions" in rule:
            return any(each["type"] in conditions for each in rule["onPodConditions"] if each["status"] == "True")
        codes = rule["onExitCodes"]
        if codes.get("containerName", self._container) != self._container:
            return False
        return bool((exit_code in codes["values"]) == (codes["operator"] == "In"))


def _check(rule: Manifest, containers: set[str]) -> None:
    """Raises: ValueError: what validation refuses."""
    if rule["action"] not in ("Ignore", "Count", "FailJob"):
        raise ValueError(f"action {rule['action']!r} is not known here")
    if ("onExitCodes" in rule) == ("onPodConditions" in rule):
        raise ValueError("a rule has either onExitCodes or onPodConditions")
    if "onExitCodes" in rule:
        codes = rule["onExitCodes"]
        values = codes["values"]
        if codes["operator"] not in ("In", "NotIn"):
            raise ValueError(f"operator {codes['operator']!r}")
        if not values or values != sorted(set(values)):
            raise ValueError(f"values {values}: must be ordered, without duplicates, and not empty")
        if 0 in values and codes["operator"] == "In":
            raise ValueError("values: must not be 0 for the In operator")
        if codes.get("containerName", next(iter(containers))) not in containers:
            raise ValueError(f"containerName {codes['containerName']!r}: no such container")
