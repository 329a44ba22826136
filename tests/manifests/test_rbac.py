"""The coordinator may do what its code does, and nothing else; the other services may do nothing."""

import itertools

import pytest

from coordinator.fleet.kubernetes.api.rollout_set import RolloutSet
from tests.manifests.kustomize import OVERLAYS, Manifest, find, kinds, overlay


def granted(rules: list[Manifest]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of a role's rules."""
    return {
        triple for rule in rules for triple in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_the_role_is_what_the_code_uses(name: str) -> None:
    (role,) = kinds(overlay(name), "Role")
    ours = RolloutSet(kind="StatefulSet", name="rollout")
    assert granted(role["rules"]) == {(each.group, each.resource, each.verb) for each in ours.permissions}


def test_it_may_scale_the_rollout_set_only() -> None:
    rules = find(overlay("base"), "Role", "coordinator")["rules"]
    assert [rule["resourceNames"] for rule in rules if "statefulsets/scale" in rule["resources"]] == [["rollout"]]


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_nobody_else_is_bound(name: str) -> None:
    (binding,) = kinds(overlay(name), "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["coordinator"]
    assert not kinds(overlay(name), "ClusterRole")
    assert not kinds(overlay(name), "ClusterRoleBinding")
