"""The view of a run: a task that follows it, and that is not worth the run."""

import asyncio
import os
from pathlib import Path

from launcher.view.follow import follow
from launcher.view.run_view import RunView
from servicekit.redis.records import COORDINATOR
from tandem_config.schema import RunConfig
from tandem_files.metrics_file import METRICS_FILE
from tandem_files.run_folder import LauncherNotes, read_token, write_notes

# How long the last events may take to arrive after the coordinator has ended.
_LAST_EVENTS_S = 3.0


class Watching:
    """Shows a run while it goes on; notes in its folder where `tandem status` finds it.

    Args:
        launch_id: the run's name in Redis.
    """

    def __init__(self, config: RunConfig, run_dir: Path, launch_id: str, redis_url: str, view: RunView) -> None:
        self._run_dir, self._launch_id, self._redis_url, self._view = run_dir, launch_id, redis_url, view
        self._roles = {
            "trainer": ["trainer"],
            "rollout": [f"rollout-{index}" for index in range(config.rollout.replicas)],
            COORDINATOR: [COORDINATOR],
        }
        self._notes = LauncherNotes(pid=os.getpid(), run_id=launch_id)
        self._task: asyncio.Task[None] | None = None
        self._found_coordinator = False

    async def begin(self) -> None:
        """From the run's first event on; anew after another coordinator has begun, whose events are others."""
        await self.drop()
        write_notes(self._run_dir, self._notes)
        self._task = asyncio.create_task(self._watch(), name="watch the run")

    async def end(self) -> None:
        """The run is over: its last events are still shown."""
        if self._task is not None and self._found_coordinator:
            await asyncio.wait([self._task], timeout=_LAST_EVENTS_S)
        await self.drop()

    async def drop(self) -> None:
        """Show no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        """Whatever goes wrong with the view is said, and the run goes on."""
        try:
            token = read_token(self._run_dir)
            await follow(self._redis_url, self._launch_id, self._roles, self._view, self._note_coordinator, token)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with the view is not worth the run
            rows = self._run_dir / METRICS_FILE
            self._view.warning(f"the progress view ended ({error}); the run goes on, see {rows}")

    def _note_coordinator(self, address: str) -> None:
        self._found_coordinator = True
        write_notes(self._run_dir, LauncherNotes(**{**vars(self._notes), "coordinator": address}))
