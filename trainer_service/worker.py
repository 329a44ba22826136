"""The torch thread of a rank: joins the world, loads the model, then executes commands until STOP.

All torch.distributed calls of a rank come from this thread, so that their order is that of the commands. The main
thread runs the event loop: health, RPCs, signals.
"""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from servicekit.environment import ServiceEnvironment
from servicekit.errors import Aborted, ConfigurationSkew, TandemError
from servicekit.lifecycle.garbage import collect_from_now_on
from servicekit.logs import get_logger
from servicekit.redis.records import AgreedSettings
from servicekit.redis.registry import SETTINGS_ADVICE, Registry
from tandem_config.comparing.agreeing import settings_of_ranks
from tandem_config.comparing.resuming import compare, refuse
from tandem_config.schema import RunConfig
from tandem_files import checkpoints
from tandem_files.run_folder import RunIdentity
from trainer_service.engine import TrainerEngine
from trainer_service.ranks.commands import Handlers, Wire
from trainer_service.ranks.handlers import CommandHandlers
from trainer_service.ranks.liveness import Liveness
from trainer_service.ranks.publish import Publisher
from trainer_service.ranks.world import Place, connect, device_of, meet
from weightsync.plans.participants import trainer_slot
from weightsync.transfer.session import SyncMember

# Key of rank 0's settings in the store.
_SETTINGS = "settings"
# For the table of a step that was profiled just before the end: less than the end of a rank is waited for
# (app.DRAIN_GRACE_S). The process ends without its threads, and what it has started ends with it.
_PROFILE_S = 20.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a rank."""

    config: RunConfig
    environment: ServiceEnvironment
    place: Place
    owner: RunIdentity  # of the run's folder
    resume: bool


# Executes commands on this rank until STOP: Commander.run on rank 0, follow on the others.
Serve = Callable[[Wire, Handlers], None]


class Worker:
    """Owns the torch thread, a daemon; its results and errors are in `loaded` and `ended`."""

    def __init__(
        self, settings: WorkerSettings, registry: Registry, serve: Serve, on_stop: Callable[[str], None]
    ) -> None:
        self._settings, self._registry, self._serve, self._on_stop = settings, registry, serve, on_stop
        self.loaded: Future[TrainerEngine] = Future()
        self.ended: Future[None] = Future()
        self.liveness: Liveness | None = None
        self._member: SyncMember | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def interrupt(self, round_id: str) -> None:
        """On rank 0, from any thread: end the waits of all ranks in a phase of this sync round."""
        if self._member is not None and self.liveness is not None:
            self._member.interrupt(round_id)
            self.liveness.interrupt(round_id)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            failure = self._explained(error)
            if not self.loaded.done():
                self.loaded.set_exception(failure)
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)

    def _explained(self, error: BaseException) -> BaseException:
        """Report a failure to the other ranks; on rank 0 find out which rank failed first.

        Returns: the error to record. A TandemError (a configuration that does not fit the model, say) stays as it is.
        """
        if self.liveness is None:
            return error
        try:
            self.liveness.report(error)
            if self._settings.place.rank == 0 and not isinstance(error, TandemError):
                return TrainerFailed(self.liveness.diagnose(error))
        except RuntimeError as lost:
            log.warning("failure report not delivered", error=str(lost))
        return error

    def _work(self) -> None:
        place, trainer = self._settings.place, self._settings.config.trainer
        environment = self._settings.environment
        device = device_of(place)
        if device.type == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        store = meet(place, self._registry, environment, self._settings.config.run.startup_timeout_s)
        self.liveness = Liveness(store, place.rank, place.world_size)
        self.liveness.start(self._on_stop)
        check_same_settings(store, place, self._settings.config)
        group = connect(place, store, device, environment.advertise_host, trainer.collective_timeout_s)
        engine = self._load(store, device)
        member = self._member = self._make_member(engine)
        member.start()
        self.liveness.on_interrupt = member.interrupt
        collect_from_now_on()
        self.loaded.set_result(engine)
        try:
            publisher = Publisher(member.run_phase, engine.weights)
            handlers = CommandHandlers(engine, publisher, self._settings.config.model.path)
            self._serve(Wire(group, trainer.collective_timeout_s), handlers.table())
            self.liveness.end()
        finally:
            member.close()
        dist.barrier(group=group)
        dist.destroy_process_group()
        engine.finish_profiles(_PROFILE_S)

    def _fail(self, why: str) -> None:
        """End all ranks: this one can no longer take part in weight syncs."""
        log.error("trainer rank ends", rank=self._settings.place.rank, error=why)
        if self.liveness is not None:
            self.liveness.report(Aborted(why))

    def _load(self, store: dist.Store, device: torch.device) -> TrainerEngine:
        # not at the top: the import takes seconds and prepares megatron for the device
        from trainer_service.megatron_engine.engine import MegatronEngine

        config = self._settings.config
        engine = MegatronEngine(config, device, self._settings.environment.run_dir)
        folder = self._restore(engine, store) if self._settings.resume else None
        if folder is None:
            engine.load(config.model.path)
        source = str(config.model.path if folder is None else folder)
        log.info("model loaded", source=source, policy_version=engine.policy_version, device=str(device))
        return engine

    def _restore(self, engine: TrainerEngine, store: dist.Store) -> Path | None:
        """Load the newest undamaged checkpoint. Returns: its folder; None: the run has no checkpoint yet.

        Raises: ConfigError: all are damaged, or the newest is of another model or type.
        """
        run_dir, damaged = self._settings.environment.run_dir, []
        candidates = self._checkpoints(store)
        for folder in candidates:
            try:
                engine.load_checkpoint(folder)
                return folder
            except checkpoints.DamagedCheckpoint as damage:
                log.error("damaged checkpoint skipped", error=str(damage))
                damaged.append(damage)
        if damaged:
            raise checkpoints.none_left(run_dir, damaged)
        return None

    def _checkpoints(self, store: dist.Store) -> list[Path]:
        """List the trainer's folders of usable checkpoints, newest first.

        Rank 0 looks for all ranks: two looks could find different ones. It reads the small files only; each rank
        reads its own shards before it loads them.

        Raises: ConfigError: the newest is of another run, or of a configuration that may not change so.
        """
        if self._settings.place.rank == 0:
            found, over = checkpoints.usable(self._settings.environment.run_dir)
            for damage in over:
                log.error("unusable checkpoint skipped", error=str(damage))
            for _, folder in found[:1]:
                mark = checkpoints.read_complete(folder)
                refuse(compare(mark, self._settings.config, self._settings.owner), folder)
            store.set("checkpoints", json.dumps([str(folder / checkpoints.TRAINER_FOLDER) for _, folder in found]))
        return [Path(text) for text in json.loads(store.get("checkpoints").decode())]

    def _make_member(self, engine: TrainerEngine) -> SyncMember:
        environment = self._settings.environment
        return SyncMember(
            spec=engine.spec,
            slot=trainer_slot(self._settings.place.rank),
            parallel=engine.parallel,
            tensors=engine.tensors(),
            redis_url=environment.redis_url,
            group=f"tandem:{environment.run_id}",
            host=environment.advertise_host,
            lease_ttl_s=self._settings.config.sync.lease_ttl_s,
            on_lost=self._fail,
            disk_folder=self._settings.config.sync.published_folder(environment.run_dir),
            expose_memory=not self._settings.config.trainer.offload.parameters,
        )


def check_same_settings(store: dist.Store, place: Place, config: RunConfig) -> None:
    """Compare this rank's configuration with that of rank 0, which may be on another host.

    Raises: ConfigurationSkew: names the settings that differ.
    """
    ours = AgreedSettings(settings_of_ranks(config))
    if place.rank == 0:
        store.set(_SETTINGS, ours.to_json())
        return
    differences = ours.differences(store.get(_SETTINGS).decode())
    if differences:
        raise ConfigurationSkew(
            f"rank {place.rank} has read another configuration than rank 0: {differences}: {SETTINGS_ADVICE}"
        )


class TrainerFailed(Exception):
    """The trainer failed; the message names the rank and its error."""
