"""Finds a run in a cluster: its objects by their label, in one namespace."""

from dataclasses import dataclass, field
from typing import Any

from coordinator.fleet.kubernetes.api.pods import NAME, NAME_LABEL, RUN_LABEL
from launcher.deploy.running.api import Object, OperatorApi, of_run
from launcher.deploy.running.kinds import BY_NAME, KINDS, Kind, component_of
from servicekit.errors import ConfigError, PermissionDenied

JOB, POD = BY_NAME["batch", "Job"], BY_NAME["", "Pod"]
COORDINATOR = "coordinator"
RUN_ROOT = "/var/lib/tandem/run"
_RUN_DIR, _RUN_ID = "TANDEM_RUN_DIR", "$(TANDEM_RUN_ID)"


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """The objects of a run.

    Attributes:
        objects: by kind, in the order of `KINDS`; kinds without any are left out.
        unread: what this account may not list, of what the run may have: why, by kind.
    """

    run: str
    namespace: str
    objects: dict[Kind, list[Object]] = field(default_factory=dict)
    unread: dict[Kind, PermissionDenied] = field(default_factory=dict)

    @property
    def pods(self) -> list[Object]:
        """All pods of the run, by name."""
        return sorted(self.objects.get(POD, []), key=lambda pod: str(pod["metadata"]["name"]))

    @property
    def job(self) -> Object | None:
        """The coordinator's Job; None: it is deleted."""
        jobs = [job for job in self.objects.get(JOB, []) if component_of(job) == COORDINATOR]
        return jobs[0] if jobs else None

    def coordinator_pod(self) -> Object | None:
        """Return the newest pod of the coordinator; None: there is none."""
        pods = [pod for pod in self.pods if component_of(pod) == COORDINATOR]
        return max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)

    def container(self) -> Object | None:
        """Return the coordinator's container, as the Job has it; None: it is deleted."""
        if self.job is None:
            return None
        found: Object = self.job["spec"]["template"]["spec"]["containers"][0]
        return found

    def run_dir(self) -> str:
        """Return the run's folder, as pods have it."""
        container = self.container() or {}
        values = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
        return str(values.get(_RUN_DIR) or f"{RUN_ROOT}/{_RUN_ID}").replace(_RUN_ID, self.run)

    def claim(self) -> str:
        """Return the claim that has the run's folder. Raises: ConfigError: the Job does not say, or is deleted."""
        volumes = [] if self.job is None else self.job["spec"]["template"]["spec"].get("volumes", [])
        claims = {
            entry["name"]: entry["persistentVolumeClaim"]["claimName"]
            for entry in volumes
            if "persistentVolumeClaim" in entry
        }
        if "run" not in claims:
            raise ConfigError(f"the Job of run {self.run} is deleted, so that its claim is unknown: give --run-claim")
        return str(claims["run"])


def find_run(api: OperatorApi, run: str, *, searched: bool) -> LiveRun:
    """Find a run in the namespace of `api`; where it is not there and `searched`, in all namespaces.

    Changes `api.namespace` to where the run is. Raises: ConfigError: there is no such run; names those that there are.
    """
    found = _in_namespace(api, run)
    if not found.objects and searched:
        elsewhere = sorted({str(job["metadata"]["namespace"]) for job in _jobs(api, of_run(run))} - {api.namespace})
        if len(elsewhere) > 1:
            raise ConfigError(f"run {run} is in several namespaces: {', '.join(elsewhere)}; give --namespace")
        if elsewhere:
            api.namespace = elsewhere[0]
            found = _in_namespace(api, run)
    if not found.objects:
        raise ConfigError(f"no run {run} in namespace {api.namespace} (context {api.context}){_others(api)}")
    return found


def _in_namespace(api: OperatorApi, run: str) -> LiveRun:
    live = LiveRun(run=run, namespace=api.namespace)
    for kind in KINDS:
        try:
            found = api.find(kind, of_run(run))
        except PermissionDenied as error:
            live.unread[kind] = error  # e.g. of Secrets, which a reader need not see
            continue
        if found:
            live.objects[kind] = found
    return live


def _jobs(api: OperatorApi, selector: str) -> list[Object]:
    """List the Jobs of all namespaces; none if this account may not."""
    try:
        return api.read_all("/apis/batch/v1/jobs", "list jobs of all namespaces", selector)
    except PermissionDenied:
        return []


def _others(api: OperatorApi) -> str:
    """Name the runs that there are."""
    selector = f"{NAME_LABEL}={NAME}"
    jobs: list[Any] = _jobs(api, selector) or api.find(JOB, selector)
    runs = {
        f"{job['metadata']['labels'][RUN_LABEL]} in {job['metadata']['namespace']}"
        for job in jobs
        if RUN_LABEL in (job["metadata"].get("labels") or {})
    }
    return f"; there are: {', '.join(sorted(runs))}" if runs else "; there is no other either"
