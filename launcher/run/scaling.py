"""Follows `tandem scale` while a launch lasts: starts the replicas that a wish adds, ends those that are too many.

The command leaves a wish in the run's folder; the launcher notes there what it has made of it, for the command, the
coordinator and the next resume (tandem_files/run_folder.py). A replica that goes hands over what it samples before it
ends (rollout_service/app.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.run.devices import plan_devices
from launcher.run.processes import is_rollout
from launcher.run.restarts import Restarts
from launcher.run.supervisor import ProcessSpec, Supervisor
from servicekit.errors import ConfigError
from servicekit.rpc.request_bounds import MAX_RANKS
from tandem_config.cross_checks import cross_check
from tandem_config.schema import RunConfig
from tandem_files.run_folder import Scale, Wish, read_scale, read_wish, write_scale

LOOK_S = 0.5
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_GIB = 2**30


class Scaling:
    """The replicas that a launch has.

    Args:
        scale: as the launch begins.
        plan: plans all processes of the run, with so many replicas.
        why_not: says why the run cannot have so many; "": it can.
        say: shows a line to the user.
    Attributes:
        planned: the processes that the run should have.
        leaving: the ends of replicas that are taken away, or begin anew.
    """

    def __init__(
        self,
        run_dir: Path,
        scale: Scale,
        supervisor: Supervisor,
        restarts: Restarts,
        *,
        plan: Callable[[int], list[ProcessSpec]],
        why_not: Callable[[int], str],
        say: Callable[[str], None],
    ) -> None:
        self._run_dir, self._scale, self._supervisor, self._restarts = run_dir, scale, supervisor, restarts
        self._plan, self._why_not, self._say = plan, why_not, say
        self._complaint = ""
        self.planned = plan(scale.replicas)
        self.leaving: dict[str, asyncio.Task[None]] = {}

    @property
    def replicas(self) -> int:
        """How many replicas there should be."""
        return self._scale.replicas

    async def wait(self) -> None:
        """Wait for a wish, or for the end of a replica that leaves."""
        while True:
            if self._unread() is not None or any(task.done() for task in self.leaving.values()):
                return
            await asyncio.sleep(LOOK_S)

    async def follow(self) -> None:
        """Do what wait() has waited for."""
        if (wish := self._unread()) is not None:
            self._answer(wish)
        for name in [name for name, task in self.leaving.items() if task.done()]:
            del self.leaving[name]
            self._supervisor.forget(name)
        for spec in self.planned:
            if spec.name not in self._supervisor.names:
                try:
                    await self._supervisor.start(spec)
                except OSError as error:
                    self._say(f"{spec.name} not started: {error}")
                    self.planned = [other for other in self.planned if other is not spec]

    def _unread(self) -> Wish | None:
        try:
            wish = read_wish(self._run_dir)
        except ConfigError as error:
            if str(error) != self._complaint:
                self._say(f"not scaled: {error}")
            wish, self._complaint = None, str(error)
        return None if wish is None or wish.wish_id == self._scale.wish_id else wish

    def _answer(self, wish: Wish) -> None:
        before, why = self._scale, self._why_not(wish.replicas)
        after = before.replicas if why else wish.replicas
        self._scale = replace(before, replicas=after, wish_id=wish.wish_id, refused=why)
        try:
            # First: who is missed follows it.
            write_scale(self._run_dir, self._scale)
        except OSError as error:
            self._scale, why = replace(before, wish_id=wish.wish_id), str(error)
        if why:
            self._say(f"not scaled to {wish.replicas} replicas: {why}")
            return
        self.planned = self._plan(after)
        names = self._restarts.names = [spec.name for spec in self.planned]
        running = [name for name in self._supervisor.names if is_rollout(name)]
        gone = [name for name in running if name not in names]
        for name in {*gone, *self._restarts.left_out} - set(self.leaving):
            self.leaving[name] = asyncio.create_task(self._supervisor.end(name), name=f"end {name}")
        self._restarts.left_out.clear()
        added = [name for name in names if is_rollout(name) and name not in running]
        does = "".join(f"; {what} {', '.join(some)}" for what, some in (("starting", added), ("ending", gone)) if some)
        self._say(f"scaled from {before.replicas} to {after} replicas{does}")


def at_resume(run_dir: Path, configured: int, overrides: Sequence[str]) -> tuple[Scale, str]:
    """Return with how many replicas a resume begins, and a line about it, if that is not what is configured.

    Args:
        configured: rollout.replicas of its configuration, with overrides.
    Raises: ConfigError: what was noted cannot be read.
    """
    noted, wish = read_scale(run_dir), read_wish(run_dir)
    known = Scale(replicas=configured, configured=configured, wish_id="" if wish is None else wish.wish_id)
    last = Scale(replicas=configured, configured=configured) if noted is None else noted
    is_asked = wish is not None and wish.wish_id != last.wish_id
    asked = wish.replicas if wish is not None and is_asked else last.replicas
    why = ""
    if any(text.partition("=")[0].strip() == "rollout.replicas" for text in overrides):
        why = "--set rollout.replicas counts"
    elif last.configured != configured and not is_asked:
        why = f"rollout.replicas was {last.configured} and is {configured}, which counts"
    if asked == configured:
        return known, ""
    if why:
        return known, f"{why}, not the {asked} of `tandem scale`"
    return replace(known, replicas=asked), f"{asked} replicas, as `tandem scale` has asked"


def why_not_configured(config: RunConfig, replicas: int) -> str:
    """Say why a run of this configuration cannot have so many replicas; "": it can."""
    ranks = config.trainer.world_size + replicas * config.rollout.tensor_parallel
    if ranks > MAX_RANKS:
        return f"{replicas} replicas are {ranks} ranks with the trainer's; a weight sync has {MAX_RANKS} at most"
    problems = cross_check(config.changed("rollout", replicas=replicas), lambda *keys: "rollout.replicas" in keys)
    return "; ".join(f"{replicas} replicas: {one.key} = {one.value} {one.message}" for one in problems)


def why_not_here(config: RunConfig, gpus: Sequence[str], supervisor: Supervisor, replicas: int) -> str:
    """Say why this machine cannot have so many replicas of a run; "": it can.

    Args:
        gpus: those of the run; none: it computes on the CPU.
        supervisor: of its processes.
    """
    why, running = why_not_configured(config, replicas), [name for name in supervisor.names if is_rollout(name)]
    if why or replicas <= len(running):
        return why
    if gpus:
        plan = plan_devices(config.changed("rollout", replicas=replicas), gpus)
        return (
            ""
            if plan.on_gpus
            else f"{replicas} replicas need {plan.needed} GPUs with the trainer's, {len(gpus)} are there"
        )
    sizes = [sum(_resident_bytes(pid) for pid in supervisor.pids(name)) for name in running]
    needed, free = (replicas - len(running)) * sum(sizes) // max(1, len(sizes)), _available_bytes()
    if needed <= free:
        return ""
    return (
        f"{replicas - len(running)} more replicas need {needed / _GIB:.1f} GiB of memory, as much as those that run "
        f"have resident; {free / _GIB:.1f} GiB are available"
    )


def _resident_bytes(pid: int) -> int:
    """Read the memory of a process; what it shares counts in parts. 0: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _available_bytes() -> int:
    """Return the memory that processes of this machine, or this container, can still take."""
    lines = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no limit
        return free
