"""Every object of every overlay is valid in Kubernetes 1.29 to 1.37, strictly: an unknown field is an error."""

import copy

import pytest
from kubernetes_validate import utils

from tests.manifests.kustomize import ONCE, OVERLAYS, VARIANTS, find, overlay
from tests.manifests.schemas import VERSIONS, is_custom, problems


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["base", *ONCE, *OVERLAYS, *VARIANTS])
def test_every_object_is_valid(name: str, version: str) -> None:
    found = [problem for each in overlay(name) if not is_custom(each) for problem in problems(each, version)]
    assert not found


def test_overlays_hold_no_custom_resources() -> None:
    """They work on a cluster with nothing installed but the GPU operator."""
    assert not [each["kind"] for name in OVERLAYS for each in overlay(name) if is_custom(each)]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_typo_is_found(version: str) -> None:
    broken = copy.deepcopy(find(overlay("cluster"), "StatefulSet", "trainer"))
    broken["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    assert "terminationGracePeriodSecond" in problems(broken, version)[0]


def test_every_version_has_its_own_schemas() -> None:
    """kubernetes-validate would take an older version's without a word."""
    available = {utils.major_minor(version) for version in utils.all_versions()}
    assert set(VERSIONS) <= available
