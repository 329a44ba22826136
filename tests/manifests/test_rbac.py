"""The coordinator may do what its code does, and nothing else; the other services may do nothing."""

import itertools

import pytest

from coordinator.fleet.kubernetes.api.permissions import PERMISSIONS
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from tests.manifests.kustomize import OVERLAYS, Manifest, find, kinds, overlay


def granted(rules: list[Manifest]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of a role's rules."""
    return {
        triple for rule in rules for triple in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_the_role_is_what_the_code_uses(name: str) -> None:
    (role,) = kinds(overlay(name), "Role")
    assert granted(role["rules"]) == used(PodSet(kind="StatefulSet", name="rollout"))
    (reads,) = [rule for rule in role["rules"] if rule["resources"] == ["statefulsets"]]
    assert (reads["resourceNames"], reads["verbs"]) == (["rollout"], ["get"])


def used(*pod_sets: PodSet) -> set[tuple[str, str, str]]:
    """What the code needs for these sets."""
    needed = [*PERMISSIONS, *(permission for pod_set in pod_sets for permission in pod_set.permissions)]
    needed += [pod_set.get for pod_set in pod_sets if pod_set.name == "rollout"]
    return {(each.group, each.resource, each.verb) for each in needed}


def test_it_may_scale_the_runs_sets_only() -> None:
    rules = find(overlay("base"), "Role", "coordinator")["rules"]
    scaled = [rule["resourceNames"] for rule in rules if "statefulsets/scale" in rule["resources"]]
    assert scaled == [["rollout"], ["trainer"]]


def test_it_may_delete_the_trainers_job_set_which_has_no_scale() -> None:
    rules = find(overlay("dev-cpu + jobset"), "Role", "coordinator")["rules"]
    assert granted(rules) == used(PodSet(kind="StatefulSet", name="rollout"), PodSet(kind="JobSet", name="trainer"))
    (deletes,) = [rule for rule in rules if "delete" in rule["verbs"]]
    assert (deletes["resources"], deletes["resourceNames"]) == (["jobsets"], ["trainer"])


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_nobody_else_is_bound(name: str) -> None:
    (binding,) = kinds(overlay(name), "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["coordinator"]
    assert not kinds(overlay(name), "ClusterRole")
    assert not kinds(overlay(name), "ClusterRoleBinding")
