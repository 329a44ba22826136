"""`tandem deploy status`: what the cluster says of a run, and what its coordinator answers."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator

from kubernetes import client

from coordinator.fleet.kubernetes.api.pods import Pod, read_pod, seen_at
from launcher.deploy.running.api import Object, OperatorApi, of_run
from launcher.deploy.running.kinds import MAKES_PODS, component_of, has_ended, templates
from launcher.deploy.running.run import COORDINATOR, JOB, POD, LiveRun
from launcher.deploy.running.streams import forwarded
from launcher.view.status import ask_coordinator
from servicekit.errors import PermissionDenied, TandemError

GRPC_PORT = 50051
Lines = list[tuple[str, str]]
_LONGEST_END = 600
_ENDS = ("Complete", "Failed")


def describe_run(api: OperatorApi, run: LiveRun) -> Lines:
    """Describe a run as (name, text) pairs."""
    lines = [("run", f"{run.run} in namespace {run.namespace} (context {api.context})"), ("job", _job(run.job))]
    lines += _sizes(run)
    lines += list(_troubles(run))
    lines += list(_refused_pods(api, run))
    pod = run.coordinator_pod()
    if pod is not None and pod.get("status", {}).get("phase") == "Running":
        lines += _answer(api, str(pod["metadata"]["name"]))
    elif pod is not None:
        lines += _end(pod)
    return lines


def _job(job: Object | None) -> str:
    """Say how the Job stands."""
    if job is None:
        return "none: it was deleted, or never applied"
    status = job.get("status", {})
    failed = status.get("failed", 0)
    return _state(job) or f"{status.get('active', 0)} active since {status.get('startTime', '?')}, {failed} failed pods"


def _state(obj: Object) -> str:
    """Say that a Job or JobSet has ended, or is suspended, and why; "": neither."""
    for condition in obj.get("status", {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Completed", "Failed", "Suspended") and condition["status"] == "True":
            why = ": ".join(text for text in (condition.get("reason", ""), condition.get("message", "")) if text)
            return f"{condition['type']} since {condition.get('lastTransitionTime', '?')}{f' ({why})' if why else ''}"
    return ""


def _sizes(run: LiveRun) -> Lines:
    """Say how many pods are ready of how many, of each kind of pod; and what of the run could not be looked at."""
    found, ready = [], Counter(component_of(raw) for raw in run.pods if _typed(raw).ready)
    for kind in MAKES_PODS:
        if kind in run.unread:
            found.append(("not read", f"{kind.plural}: {run.unread[kind]}"))
        for entry in run.objects.get(kind, []) if kind not in (JOB, POD) else []:
            state = _state(entry)
            for name, template, wanted in templates([{**entry, "kind": kind.name}]):
                of = component_of(template)
                size = f"{'?' if POD in run.unread else ready[of]} of {wanted} ready"
                found.append((of or name, f"{size}, {state}" if state else size))
    return found


def _troubles(run: LiveRun) -> Iterator[tuple[str, str]]:
    """Name the pods that are in trouble, and what they said last."""
    for raw in run.pods:
        if component_of(raw) == COORDINATOR and raw.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        pod = _typed(raw)
        if pod.trouble:
            last = _last_line(raw)
            yield "trouble", f"pod {pod.name}: {pod.trouble}{f': {last}' if last and last not in pod.trouble else ''}"


def _refused_pods(api: OperatorApi, run: LiveRun) -> Iterator[tuple[str, str]]:
    """Say of each set that lacks pods why it could make none the last time, as of a quota that is used up."""
    there = Counter(component_of(raw) for raw in run.pods if not has_ended(raw))
    makers: dict[str, str] = {}
    for kind in MAKES_PODS if POD not in run.unread else ():
        for entry in run.objects.get(kind, []) if kind != POD else []:
            wanted = list(templates([{**entry, "kind": kind.name}]))
            if not _state(entry) and any(there[component_of(one)] < pods for _, one, pods in wanted):
                makers |= dict.fromkeys(_makers_of(entry), f"{kind.name}/{entry['metadata']['name']}")
    if not makers:
        return
    try:
        events = api.read_all(f"/api/v1/namespaces/{run.namespace}/events", "list events")
    except PermissionDenied as error:
        yield "not read", f"events, which say why pods are missing: {error}"
        return
    newest: dict[str, Object] = {}
    for event in sorted(events, key=_time_of):
        about = event.get("involvedObject", {})
        if event.get("reason") == "FailedCreate" and about.get("name") in makers and about.get("kind") != "Pod":
            newest[makers[about["name"]]] = event
    for owner, event in sorted(newest.items()):
        yield "trouble", f"{owner} lacks pods: {event.get('message', '')} (FailedCreate, {_time_of(event)})"


def _makers_of(entry: Object) -> list[str]:
    """Name a set, and the sets and Jobs that its controller makes for it."""
    name, spec = str(entry["metadata"]["name"]), entry.get("spec", {})
    jobs = [(job["name"], int(job.get("replicas", 1))) for job in spec.get("replicatedJobs", [])]
    children = [f"{name}-{job}-{index}" for job, count in jobs for index in range(count)]
    if "leaderWorkerTemplate" in spec:
        children += [f"{name}-{index}" for index in range(int(spec.get("replicas", 1)))]
    return [name, *children]


def _time_of(event: Object) -> str:
    """Return when an event was last seen."""
    series = (event.get("series") or {}).get("lastObservedTime")
    return str(series or event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _answer(api: OperatorApi, pod: str) -> Lines:
    """Ask the coordinator, through the API server."""
    try:
        with forwarded(api, pod, GRPC_PORT) as address:
            answer = asyncio.run(ask_coordinator(address, ""))
    except TandemError as error:
        return [("coordinator", f"does not answer: {error}")]
    return [(name, pod if name == "coordinator" else text) for name, text in answer]


def _end(pod: Object) -> Lines:
    """Say how the coordinator's newest pod stands or has ended."""
    name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase", "Pending")
    last = _last_line(pod)
    return [("coordinator", f"{name}: {phase}"), *([("ended", last)] if last else [])]


def _last_line(pod: Object) -> str:
    """Return the last line that a container wrote before it ended, as the kubelet keeps it."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            message = (state.get("terminated") or {}).get("message", "")
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            if lines:
                return re.sub(r"\s+", " ", lines[-1])[:_LONGEST_END]
    return ""


def _typed(raw: Object) -> Pod:
    """Read a pod as the coordinator does."""
    return seen_at(read_pod(client.V1Pod.from_dict(raw)), time.time())


def is_over(api: OperatorApi, run: str) -> bool:
    """Whether the run's Job has ended, or is deleted."""
    jobs = [job for job in api.find(JOB, of_run(run)) if component_of(job) == COORDINATOR]
    conditions = [job.get("status", {}).get("conditions") or [] for job in jobs]
    return all(any(one["type"] in _ENDS and one["status"] == "True" for one in of_job) for of_job in conditions)
