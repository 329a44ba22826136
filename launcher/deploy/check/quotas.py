"""Whether a namespace's quotas have room for all pods of a run together, and not only for each by itself. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.running.kinds import templates
from tandem_config.problems import ConfigProblem, problem

# Requests that a quota may name without `requests.`.
_PLAIN = ("cpu", "memory", "ephemeral-storage")
# Scopes without a value: whether our pods, which have requests and no deadline, are in them.
_IN_SCOPE = {"NotTerminating": True, "NotBestEffort": True, "Terminating": False, "BestEffort": False}


def quota_problems(
    built: Sequence[Manifest], quotas: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> Iterator[ConfigProblem]:
    """List what quotas refuse: an error where it is more than they have, a warning where others use it now.

    Args:
        own: pods of the run that are there already: they count in what is used, and are not to be made again.
    """
    for quota in quotas:
        asked = [(name, _counted(template, quota), pods) for name, template, pods in templates(built)]
        mine = [_counted(pod, quota) for pod in own]
        used = quota.get("status", {}).get("used") or {}
        for resource, text in (quota["spec"].get("hard") or {}).items():
            parts = {name: amounts.get(resource, Decimal(0)) * pods for name, amounts, pods in asked}
            total, hard = sum(parts.values(), Decimal(0)), parse_quantity(text)
            others = parse_quantity(used.get(resource, "0")) - sum(amounts.get(resource, 0) for amounts in mine)
            if not total or total + max(others, Decimal(0)) <= hard:
                continue
            by_set = ", ".join(f"{name} {_short(amount)}" for name, amount in parts.items() if amount)
            message = f"the run's pods ask for {_short(total)} in all ({by_set})"
            yield problem(
                f"ResourceQuota/{quota['metadata']['name']}",
                f"{resource}: {text}",
                message if total > hard else f"{message}, and others use {_short(others)}",
                "a larger quota, or a smaller run: sets wait for the pods that it refuses (FailedCreate)",
                severity="error" if total > hard else "warning",
            )


def _counted(pod: Mapping[str, Any], quota: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a quota counts of a pod or a template, by the quota's names."""
    selector = quota["spec"].get("scopeSelector") or {}
    scopes: list[tuple[str, str, Sequence[str]]] = [
        (scope, "Exists", []) for scope in quota["spec"].get("scopes") or []
    ]
    scopes += [
        (entry["scopeName"], entry["operator"], entry.get("values") or [])
        for entry in selector.get("matchExpressions") or []
    ]
    if not all(_is_in_scope(pod, *scope) for scope in scopes):
        return {}
    found = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for container in pod["spec"]["containers"]:
        limits = container.get("resources", {}).get("limits") or {}
        requests = limits | (container.get("resources", {}).get("requests") or {})
        amounts = [(f"limits.{name}", amount) for name, amount in limits.items()]
        for name, amount in requests.items():
            amounts += [(f"requests.{name}", amount), *([(name, amount)] if name in _PLAIN else [])]
        for name, amount in amounts:
            found[name] = found.get(name, Decimal(0)) + parse_quantity(amount)
    return found


def _is_in_scope(pod: Mapping[str, Any], scope: str, operator: str, values: Sequence[str]) -> bool:
    if scope != "PriorityClass":
        return _IN_SCOPE.get(scope, False)
    chosen = pod["spec"].get("priorityClassName")
    if operator in ("Exists", "DoesNotExist"):
        return bool(chosen) == (operator == "Exists")
    return (chosen in values) == (operator == "In")


def _short(amount: Decimal) -> str:
    return f"{float(amount) / 2**30:.4g}Gi" if amount >= 2**30 else f"{float(amount):.4g}"
