"""`tandem deploy logs`: the logs of a run's pods, as `tandem logs` prints those of a run on one machine.

Following asks again instead of keeping a stream per pod: pods come and go, and a connection that dies silently would
end a pod's log without a sign.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from rich.console import Console

from launcher.deploy.running.api import Object, OperatorApi, of_run
from launcher.deploy.running.kinds import component_of
from launcher.deploy.running.run import POD
from launcher.view.logs.lines import Entry, parse
from launcher.view.logs.show import WantedLines, print_entries
from servicekit.errors import ConfigError, InvalidRequest, NotReady

# Pause between two questions while following.
FOLLOW_S = 2.0
_NEWEST_LINES = 2000


@dataclass
class _PodLog:
    """What of a container's log has been read: all lines up to a time, as the kubelet stamped them."""

    service: str
    last: str = ""
    time_s: float = 0.0

    def entries(self, text: str) -> list[Entry]:
        """Take the lines that are new; each begins with its time."""
        lines = [
            (stamp, line) for stamp, _, line in (row.partition(" ") for row in text.splitlines()) if stamp > self.last
        ]
        if not lines:
            return []
        self.last = lines[-1][0]
        found = list(parse(self.service, (line for _, line in lines), _seconds(lines[0][0]) or self.time_s))
        self.time_s = found[-1].time_s if found else self.time_s
        return found


def show_logs(
    api: OperatorApi,
    run: str,
    console: Console,
    wanted: WantedLines,
    *,
    previous: bool = False,
    is_running: Callable[[], bool] | None = None,
) -> None:
    """Print the logs of a run's pods, by time.

    Args:
        previous: of the containers before their last restart.
        is_running: whether more may come; None: do not follow.
    Raises: ConfigError: no pod of a service that is named.
    """
    logs: dict[tuple[str, str], _PodLog] = {}

    def gained() -> list[list[Entry]]:
        return _new_entries(api, run, logs, wanted.services, previous=previous and not logs)

    print_entries(console, wanted, gained, is_running, FOLLOW_S)


def _new_entries(
    api: OperatorApi, run: str, logs: dict[tuple[str, str], _PodLog], services: Sequence[str], *, previous: bool
) -> list[list[Entry]]:
    """Read what each pod has logged since the last call."""
    pods = api.find(POD, of_run(run))
    if services:
        pods = [pod for pod in pods if not {component_of(pod), pod["metadata"]["name"]}.isdisjoint(services)]
    if not pods and not logs:
        named = f" of {', '.join(services)}" if services else ""
        raise ConfigError(f"run {run} has no pods{named} in namespace {api.namespace}")
    found = []
    for pod in pods:
        key = (str(pod["metadata"]["name"]), str(pod["metadata"].get("uid", "")))
        log = logs.setdefault(key, _PodLog(service=key[0]))
        found.append(log.entries(_text(api, pod, log.last, previous=previous)))
    return found


def _text(api: OperatorApi, pod: Object, since: str, *, previous: bool) -> str:
    """Read the log of a pod's container; "" if it has none yet."""
    name = str(pod["metadata"]["name"])
    query = {"container": str(pod["spec"]["containers"][0]["name"]), "timestamps": "true"}
    query |= {"sinceTime": since} if since else {"tailLines": str(_NEWEST_LINES)}
    query |= {"previous": "true"} if previous else {}
    try:
        return api.text(f"{POD.path(api.namespace, name)}/log?{urlencode(query)}", f"get pods/log {name}")
    except (NotReady, InvalidRequest):
        return ""  # it is not running yet, is gone, or has no container before this one


def _seconds(stamp: str) -> float:
    """Convert the kubelet's time, which has nanoseconds; 0: it is none."""
    try:
        return datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00").timestamp()
    except ValueError:
        return 0.0
