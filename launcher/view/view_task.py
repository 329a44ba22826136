"""The task that shows a run; if it fails, the run continues."""

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


class ViewTask:
    """Shows a running run, and notes the coordinator's address in the run's folder, for `tandem status`.

    Args:
        launch_id: name of the run in Redis.
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
        """Show the run from its first event on; call it again when another coordinator starts."""
        await self.cancel()
        write_notes(self._run_dir, self._notes)
        self._task = asyncio.create_task(self._watch(), name="watch the run")

    async def finish(self) -> None:
        """Show the last events of a run that is over, and stop."""
        if self._task is not None and self._found_coordinator:
            await asyncio.wait([self._task], timeout=_LAST_EVENTS_S)
        await self.cancel()

    async def cancel(self) -> None:
        """Stop showing the run."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        """Follow the run; a failure of the view becomes a warning."""
        try:
            token = read_token(self._run_dir)
            await follow(self._redis_url, self._launch_id, self._roles, self._view, self._note_coordinator, token)
        except Exception as error:  # noqa: BLE001 - a failure of the view must not end the run
            rows = self._run_dir / METRICS_FILE
            self._view.warning(f"the progress view failed: {error}; the run continues, see {rows}")

    def _note_coordinator(self, address: str) -> None:
        self._found_coordinator = True
        write_notes(self._run_dir, LauncherNotes(**{**vars(self._notes), "coordinator": address}))
