"""Writes the policy as Hugging Face folders, every n iterations and at the end; a failure does not end the run."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from servicekit.errors import DeadlineExceeded, Internal, InvalidRequest, describe
from tandem_clients.trainer import Trainer
from tandem_files.atomic import NotRemoved
from tandem_files.exports import FINAL, export_folder, note_template, prune_exports


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """The exports of one run.

    Attributes:
        run_dir: an absolute path.
        every: iterations between exports; None: only the final one.
        keep: number of newest exports to keep, besides the final one.
        template: the chat template that replaces the tokenizer's; None: none does.
        left: called with what could not be removed of old exports (tandem_files.atomic.remove_each).
        check: raises if another coordinator leads the run; called before each is removed, in a thread.
    """

    run_dir: Path
    trainer: Trainer
    every: int | None
    keep: int
    template: str | None
    left: Callable[[Sequence[str]], object]
    check: Callable[[], None]

    def note_template(self) -> None:
        """Record the chat template in the run's folder, for the trainer's exports and those of `tandem export`."""
        note_template(self.run_dir, self.template, self.check)

    def is_due(self, iteration: int) -> bool:
        """Whether the policy is exported after `iteration`."""
        return self.every is not None and iteration % self.every == 0

    async def export(self, iteration: int) -> str:
        """Export the policy after `iteration`, and remove the oldest exports.

        Returns: what went wrong, as a sentence; "": nothing.
        Raises: TandemError: the trainer is lost.
        """
        problem = await self._write(export_folder(self.run_dir, iteration))
        if not problem:
            left: list[str] = []
            try:
                await asyncio.to_thread(prune_exports, self.run_dir, iteration, self.keep, self.check)
            except NotRemoved as error:
                left = error.left
            except OSError as error:
                left = [describe(error)]
            self.left(left)
        return problem

    async def export_final(self) -> str:
        """Export the policy at the end of the run; returns and raises as `export`."""
        return await self._write(self.run_dir / FINAL)

    async def _write(self, folder: Path) -> str:
        try:
            await self.trainer.export_model(folder)
        except (Internal, InvalidRequest, DeadlineExceeded) as error:
            await self.trainer.status()  # raises if the trainer is lost, which ends the run by its name
            name = folder.relative_to(self.run_dir)
            return f"{name} not written: {error}; from a checkpoint: tandem export {self.run_dir} --out DIR"
        return ""
