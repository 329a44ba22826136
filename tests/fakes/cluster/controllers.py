"""The pods that controllers make of a workload, with the names, labels and annotations that they add; part of a FAKE.

StatefulSet       NAME-0, ...                   Deployment   NAME-HASH-HASH
Job               NAME-HASH                     JobSet       NAME-REPLICATED-0-0-HASH, ...: those of an indexed Job
LeaderWorkerSet   leaders NAME-0, ...: a StatefulSet's; workers NAME-0-1, ...: those of a StatefulSet NAME-0
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.fakes.cluster.store import Object

HASH = "x7k2p"
_REVISION = "5d8c7f9b6d"
_LONGEST_GENERATED = 58  # of metadata.generateName: 63 without the hash
_LWS, _JOBSET, _BATCH = "leaderworkerset.sigs.k8s.io/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/"


def pods_of(workload: Object) -> Iterator[Object]:
    """All pods of a StatefulSet, Job, Deployment, JobSet or LeaderWorkerSet, as their controllers ask for them."""
    spec, name = workload["spec"], workload["metadata"]["name"]
    make = {"Job": _of_job, "JobSet": _of_job_set, "LeaderWorkerSet": _of_group, "Deployment": _of_deployment}
    if workload["kind"] == "StatefulSet":
        for index in range(int(spec.get("replicas", 1))):
            yield _in_set(workload, spec["template"], name, index)
    else:
        yield from make[workload["kind"]](workload, spec, name)


def _of_deployment(workload: Object, spec: Object, name: str) -> Iterator[Object]:
    for _ in range(int(spec.get("replicas", 1))):
        labels, generate_name = {"pod-template-hash": _REVISION}, f"{name}-{_REVISION}-"
        pod = generate_name[:_LONGEST_GENERATED] + HASH  # as the API server cuts it
        yield _pod(workload, pod, spec["template"], labels, owner=("ReplicaSet", name))


def _of_job(workload: Object, spec: Object, name: str) -> Iterator[Object]:
    yield from _indexed(workload, spec, name, {})


def _of_job_set(workload: Object, spec: Object, name: str) -> Iterator[Object]:
    for jobs in spec["replicatedJobs"]:
        for index in range(int(jobs.get("replicas", 1))):
            labels = {f"{_JOBSET}jobset-name": name, f"{_JOBSET}replicatedjob-name": jobs["name"]}
            labels |= {f"{_JOBSET}job-index": str(index), f"{_JOBSET}restart-attempt": "0"}
            yield from _indexed(workload, jobs["template"]["spec"], f"{name}-{jobs['name']}-{index}", labels)


def _indexed(workload: Object, spec: Object, job: str, labels: Mapping[str, str]) -> Iterator[Object]:
    """The pods of a Job: the name is cut where it would be too long, as its controller cuts it."""
    is_indexed = spec.get("completionMode") == "Indexed"
    for index in range(int(spec.get("completions", 1))):
        end = f"-{index}-" if is_indexed else "-"
        mine = {**labels, f"{_BATCH}job-name": job, "job-name": job}
        found = _pod(workload, job[: _LONGEST_GENERATED - len(end)] + end + HASH, spec["template"], mine, ("Job", job))
        if is_indexed:
            key = f"{_BATCH}job-completion-index"
            found["metadata"]["labels"][key] = found["metadata"]["annotations"][key] = str(index)
            found["spec"] = {**found["spec"], "hostname": f"{job}-{index}"}
        yield found


def _of_group(workload: Object, spec: Object, name: str) -> Iterator[Object]:
    template = spec["leaderWorkerTemplate"]
    for group in range(int(spec.get("replicas", 1))):
        common = {f"{_LWS}name": name, f"{_LWS}group-index": str(group), f"{_LWS}group-key": "0a1b" * 10}
        common[f"{_LWS}template-revision-hash"] = _REVISION
        leader = template.get("leaderTemplate", template["workerTemplate"])
        yield _in_set(workload, leader, name, group, common | {f"{_LWS}worker-index": "0"})
        for index in range(1, int(template.get("size", 1))):
            of_worker = common | {f"{_LWS}worker-index": str(index)}
            found = _in_set(workload, template["workerTemplate"], f"{name}-{group}", index, of_worker)
            found["metadata"]["annotations"][f"{_LWS}leader-name"] = f"{name}-{group}"
            yield found


def _in_set(workload: Object, template: Object, name: str, index: int, more: Mapping[str, str] | None = None) -> Object:
    """A pod of a StatefulSet of this name."""
    pod = f"{name}-{index}"
    labels = {"apps.kubernetes.io/pod-index": str(index), "statefulset.kubernetes.io/pod-name": pod}
    labels["controller-revision-hash"] = f"{name}-{_REVISION}"
    found = _pod(workload, pod, template, {**labels, **(more or {})}, ("StatefulSet", name))
    found["spec"] = {**found["spec"], "hostname": pod}
    return found


def _pod(
    workload: Object, name: str, template: Mapping[str, Any], labels: Mapping[str, str], owner: tuple[str, str]
) -> Object:
    metadata = template.get("metadata", {})
    of = {"apiVersion": "apps/v1", "kind": owner[0], "name": owner[1], "uid": "1", "controller": True}
    head: Object = {"name": name, "namespace": workload["metadata"]["namespace"], "ownerReferences": [of]}
    head |= {"labels": {**metadata.get("labels", {}), **labels}, "annotations": dict(metadata.get("annotations", {}))}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": template["spec"]}
