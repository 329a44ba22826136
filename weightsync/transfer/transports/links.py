"""The choice of a communicator's transport: its ranks exchange cards in every PREPARE, and agree before a byte moves.

All ranks see all cards and apply the same rule, so that they get the same transport, or the same error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from servicekit.errors import Aborted, ConfigError, TandemError
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.membership.nccl_settings import STAGED_ADVICE, STAGED_MAY_HANG
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.transports.collective import CollectiveTransport
from weightsync.transfer.transports.colocated import MemoryReader, MemorySource, all_messages
from weightsync.transfer.transports.colocated_slots import SLOTS, SlotReader, SlotSource
from weightsync.transfer.transports.disk import DiskTransport
from weightsync.transfer.transports.packing import Packer
from weightsync.transfer.transports.shared_memory import (
    Exposure,
    MemoryServer,
    OpenedMemory,
    expose_parameters,
    expose_slots,
    host_id,
    open_memory,
)
from weightsync.transfer.transports.transport import Transport

LINK_TIMEOUT_S = 10.0  # opening descriptors on one host takes milliseconds
_ERROR_CHARS = 300

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a rank contributes to the agreement of one round.

    Attributes:
        tensors: its parameters.
        wire_dtype: type that a trainer rank sends, or that a receiver holds.
        expose_memory: the colocated transport may hand out the tensors' own memory.
    """

    round_: pb.Round
    plan: RoundPlan
    participants: Participants
    tensors: Mapping[str, torch.Tensor]
    packer: Packer
    wire_dtype: str
    is_trainer: bool
    expose_memory: bool = True


class Links:
    """The agreed transport, kept while the communicator, the request and the trainer's memory stay the same."""

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._host_id = host_id()
        self._communicator: Communicator | None = None
        self._key: object = None
        self._transport: Transport | None = None
        self._generation = 0
        self._exposed: object = None

    def agree(self, communicator: Communicator, terms: Terms, deadline: float) -> Transport:
        """Agree on the round's transport. Every rank calls it.

        Raises: ConfigError: naming ranks that differ in plan, type or transport, or that `colocated` does not reach, or
            the round is staged and may hang; Aborted: a rank is in another round; PeerLost: naming the ranks that did
            not connect.
        """
        if communicator is not self._communicator:
            self.close()
        cards = self._show(communicator, self._card(terms), deadline)
        check_cards(cards, communicator.slots, terms.participants.trainer.world_size)
        key = (terms.round_.disk_folder, [(c.transport, c.host_id, c.memory_generation) for c in cards])
        if self._transport is None or key != self._key:
            self.close()
            self._transport = self._make(communicator, terms, cards, deadline)
            log.info("transport agreed", slot=self._slot, transport=self._transport.name)
        self._communicator, self._key = communicator, key
        if isinstance(self._transport, CollectiveTransport):
            check_staged(terms.round_, terms.participants, communicator.device)
            self._transport.connect(terms.plan, terms.participants, deadline)
        return self._transport

    def close(self) -> None:
        """Close and forget the transport."""
        if self._transport is not None:
            self._transport.close()
        self._communicator, self._transport, self._key = None, None, None

    def _card(self, terms: Terms) -> pb.TransportCard:
        if terms.is_trainer and self._exposed is not None and self._exposed != _identity(terms):
            self._generation += 1
            self._exposed = None
        return pb.TransportCard(
            round_id=terms.round_.round_id,
            plan_digest=terms.plan.digest,
            wire_dtype=terms.wire_dtype,
            transport=terms.round_.transport,
            host_id=self._host_id,
            memory_generation=self._generation,
        )

    def _show(self, communicator: Communicator, card: pb.TransportCard, deadline: float) -> list[pb.TransportCard]:
        cards = communicator.exchange(card.SerializeToString(), max(0.001, deadline - time.monotonic()))
        return [pb.TransportCard.FromString(data) for data in cards]

    def _make(
        self, communicator: Communicator, terms: Terms, cards: Sequence[pb.TransportCard], deadline: float
    ) -> Transport:
        asked = terms.round_.transport
        device = terms.packer.device
        if asked == pb.SYNC_TRANSPORT_DISK:
            return DiskTransport(communicator, Path(terms.round_.disk_folder))
        others = [s for s, card in zip(communicator.slots, cards, strict=True) if card.host_id != cards[0].host_id]
        if asked == pb.SYNC_TRANSPORT_COLOCATED:
            if others:
                raise ConfigError(f"sync.transport colocated: not on the host of trainer/0: {', '.join(others[:5])}")
            return self._link(communicator, terms, deadline)
        # CUDA IPC has not been run yet: `auto` does not choose it.
        if asked == pb.SYNC_TRANSPORT_AUTO and not others and device.type == "cpu":
            try:
                return self._link(communicator, terms, deadline)
            except ConfigError as error:
                log.warning("no shared memory, falling back to collective", slot=self._slot, error=str(error))
        return CollectiveTransport(communicator, device)

    def _link(self, communicator: Communicator, terms: Terms, deadline: float) -> Transport:
        """Open the trainer's memory in every receiver. Raises: ConfigError: on all ranks, naming those that cannot."""
        trainers = terms.participants.trainer.world_size
        server = MemoryServer() if terms.is_trainer else None
        exposure: Exposure | None = None
        memories: list[OpenedMemory] = []
        card = pb.TransportCard()
        try:
            if server is not None:
                exposure, card.link_error = _attempt_exposure(terms)
                card.memory_socket, card.memory_key = server.name, server.key
            cards = self._show(communicator, card, deadline)  # moving a large shard into shared memory takes seconds
            _check_links(cards, communicator.slots)
            opened_by = min(deadline, time.monotonic() + LINK_TIMEOUT_S)
            if server is not None and exposure is not None:
                error = _attempt(lambda: server.serve(exposure, len(communicator.slots) - trainers, opened_by))
            else:
                sockets = [(c.memory_socket, c.memory_key) for c in cards[:trainers]]
                error = _attempt(lambda: memories.extend(open_memory(*socket, opened_by) for socket in sockets))
            cards = self._show(communicator, pb.TransportCard(link_error=error), deadline)
            _check_links(cards, communicator.slots)
        except BaseException:
            if exposure is not None:
                exposure.close()
            raise
        finally:
            if server is not None:
                server.close()
        if exposure is None:
            in_slots = memories[0].description.slots > 0
            return SlotReader(communicator, memories) if in_slots else MemoryReader(communicator, memories)
        self._exposed = _identity(terms)
        in_slots = exposure.description.slots > 0
        return SlotSource(communicator, exposure) if in_slots else MemorySource(communicator, exposure)


def check_cards(cards: Sequence[pb.TransportCard], slots: Sequence[str], trainer_ranks: int) -> None:
    """Raise Aborted or ConfigError for the first card that differs from trainer/0's, naming slot and field."""
    first = cards[0]
    for slot, card in zip(slots, cards, strict=True):
        if card.round_id != first.round_id:
            raise Aborted(f"{slot} is in round {card.round_id}, {slots[0]} in {first.round_id}")
        if card.wire_dtype != first.wire_dtype:
            does = "sends" if slots.index(slot) < trainer_ranks else "holds"
            raise ConfigError(f"{slot} {does} {card.wire_dtype}, {slots[0]} sends {first.wire_dtype} (see sync.dtype)")
        if card.transport != first.transport:
            name = pb.SyncTransport.Name
            raise ConfigError(f"{slot} takes {name(card.transport)}, {slots[0]} {name(first.transport)}")
        if card.plan_digest != first.plan_digest:
            raise ConfigError(f"{slot} has plan {card.plan_digest}, {slots[0]} has {first.plan_digest}")


def check_staged(round_: pb.Round, participants: Participants, device: torch.device) -> None:
    """Raise ConfigError if messages over NCCL would run during the collectives of engines that still generate.

    An engine of one rank has no collectives. All ranks decide by the same data, so all of them refuse.
    """
    beside = [name for name, parallel in participants.replicas.items() if parallel.world_size > 1]
    if device.type != "cuda" or round_.install_mode != pb.INSTALL_MODE_STAGED or not beside:
        return
    if round_.allow_staged_nccl:
        log.warning("staged transfer concurrent with the engine's own collectives", replicas=", ".join(beside[:5]))
        return
    raise ConfigError(f"sync.install staged {STAGED_MAY_HANG}: {', '.join(beside[:5])}; {STAGED_ADVICE}")


def check_source(round_: pb.Round, participants: Participants, device: torch.device) -> None:
    """Raise ConfigError if a source would expose its memory, or send over NCCL beside its engine's own collectives."""
    if round_.source and round_.transport != pb.SYNC_TRANSPORT_COLLECTIVE:
        raise ConfigError(f"{round_.source} is the source of round {round_.round_id}: its transport must be COLLECTIVE")
    may_hang = device.type == "cuda" and participants.trainer.world_size > 1 and not round_.allow_staged_nccl
    if round_.source and may_hang:
        raise ConfigError(f"the source {round_.source} {STAGED_MAY_HANG}, so the trainer seeds; or {STAGED_ADVICE}")


def _check_links(cards: Sequence[pb.TransportCard], slots: Sequence[str]) -> None:
    failed = [f"{slot}: {card.link_error}" for slot, card in zip(slots, cards, strict=True) if card.link_error]
    if failed:
        raise ConfigError(f"memory cannot be shared: {'; '.join(failed[:3])}")


def _attempt_exposure(terms: Terms) -> tuple[Exposure | None, str]:
    made: list[Exposure] = []
    error = _attempt(lambda: made.append(_expose(terms)))
    return (made[0] if made else None), error


def _expose(terms: Terms) -> Exposure:
    """Expose the parameters themselves if they are sent without a cast and stay where they are, else two slots."""
    held = next(iter(terms.tensors.values())).dtype
    exposure = expose_parameters(terms.tensors) if terms.expose_memory and held == terms.packer.dtype else None
    if exposure is None:
        exposure = expose_slots(SLOTS, _largest_payload(terms), terms.packer.device)
    return exposure


def _largest_payload(terms: Terms) -> int:
    return max(terms.packer.payload_bytes(message) for message in all_messages(terms.plan))


def _identity(terms: Terms) -> object:
    """Return a key that changes when the exposed memory is no longer what would be sent."""
    pointers = tuple(tensor.data_ptr() for tensor in terms.tensors.values()) if terms.expose_memory else ()
    return (pointers, terms.wire_dtype, _largest_payload(terms))


def _attempt(action: Callable[[], object]) -> str:
    """Run an action. Returns: its error's text, or "": all ranks must learn of it before any of them gives up."""
    try:
        action()
    except (TandemError, OSError, RuntimeError) as error:
        return (str(error) or type(error).__name__)[:_ERROR_CHARS]
    return ""
