"""A rank of a case: a process with random tensors on its GPU that runs commands of the parent process."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from servicekit.logs import configure_logging
from tools.gpu_check.cases import Case
from tools.gpu_check.weights import numbered, random_spec

# A rank's process imports this module first; torch and what needs it are imported when it has its GPU.
ANSWER_S = 180.0
GROUP = "tandem:gpu-check"


def rank_main(case: Case, slot: str, gpu: int, url: str, size: tuple[int, int], end: Connection) -> None:
    """Run commands until the parent closes its end.

    Args:
        gpu: index of the rank's device.
        url: of the Redis server.
        size: layers and hidden size of the random model.
        end: connection to the parent.
    """
    import torch

    configure_logging("gpu-check", level="ERROR", slot=slot)
    device = torch.device(case.device, gpu) if case.device == "cuda" else torch.device(case.device)
    if case.device == "cuda":
        torch.cuda.set_device(device)
    try:
        rank = Rank(case, slot, device, url, random_spec(*size, case.experts))
        end.send(("ok", rank.act("BYTES", 0)))
        while True:
            phase, version = end.recv()
            end.send(("ok", in_foreign_thread(rank, phase, version)))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        end.send(("error", f"{type(error).__name__}: {error}"))


def in_foreign_thread(rank: "Rank", phase: str, version: int) -> Any:
    """Run `act` in a new thread, whose current device is GPU 0 as in gRPC's threads. Raises: what `act` raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(rank.act, phase, version).result(timeout=ANSWER_S)


class Rank:
    """A SyncMember and its tensors: the trainer's are the expected values, a receiver's are NaN at first."""

    def __init__(self, case: Case, slot: str, device: Any, url: str, spec: Any) -> None:
        import torch

        from weightsync.layouts.layout import Parallel
        from weightsync.layouts.megatron import megatron_layout
        from weightsync.layouts.sglang import sglang_layout
        from weightsync.transfer.session import SyncMember

        self._case, self._slot, self._device = case, slot, device
        self._trainer, self._rollout = Parallel(tensor=case.trainer), Parallel(tensor=case.rollout)
        self._sends, rank = slot.startswith("trainer"), int(slot.rpartition("/")[2])
        layout = megatron_layout(spec, self._trainer) if self._sends else sglang_layout(spec, self._rollout)
        self._expected = {name: t.to(device) for name, t in numbered(layout, rank).items()}
        nothing = {name: torch.full_like(t, torch.nan) for name, t in self._expected.items()}
        self._tensors = self._expected if self._sends else nothing
        self._segments = 0
        self._member = SyncMember(
            spec=spec,
            slot=slot,
            parallel=self._trainer if self._sends else self._rollout,
            tensors=self._tensors,
            redis_url=url,
            group=GROUP,
        )
        self._member.start()

    def act(self, what: str, version: int) -> Any:
        """Do a phase of the round of `version`, or a `do_*` method by its name in capitals."""
        own = getattr(self, f"do_{what.lower()}", None)
        return self._run(what, version) if own is None else own()

    def do_bytes(self) -> int:
        """Return the bytes of the shard."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def do_change(self) -> None:
        """Change the weights, so that neither stale parameters nor a stale spare shard can pass for new ones."""
        for tensor in self._expected.values():
            tensor.neg_()

    def do_segments(self) -> int:
        """Return the number of segments that the last round received."""
        return self._segments

    def do_peak(self) -> int:
        """Return the most bytes that torch had allocated on the GPU."""
        import torch

        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def do_check(self) -> list[str]:
        """List the parameters that do not have the expected values."""
        import torch

        return [f"{self._slot} {name}" for name, t in self._expected.items() if not torch.equal(self._tensors[name], t)]

    def _run(self, phase: str, version: int) -> None:
        from tandem_api.weights.v1 import weights_pb2 as pb
        from weightsync.plans.participants import Participants
        from weightsync.transfer.devices import wait_for_device

        case, member = self._case, self._member
        round_ = pb.Round(
            allow_staged_nccl=True,  # there is no engine here whose collectives would be beside it
            round_id=f"{case.name}-{version}",
            policy_version=version,
            group=GROUP,
            trainer=self._trainer.to_proto(),
            replicas=[pb.ReplicaSpec(name="rollout-0", parallel=self._rollout.to_proto())],
            install_mode=pb.InstallMode.Value(f"INSTALL_MODE_{case.install.upper()}"),
            transport=pb.SyncTransport.Value(f"SYNC_TRANSPORT_{case.transport.upper()}"),
            bucket_bytes=256 * 2**20,
            formation_timeout_s=120,
            transfer_timeout_s=120,
        )
        slots = Participants.of_round(round_).slots
        round_.epoch = member._lease.rendezvous.wait_for(slots, 60).epoch
        member.run_phase(pb.RoundPhase.Value(f"ROUND_PHASE_{phase}"), round_)
        wait_for_device(self._device)
        if phase == "VERIFY" and not self._sends:
            packer = member._shard.packers.get(member._transfer._written, None)
            self._segments = sum(len(packer.segments(message)) for message, _ in member._transfer._stats.received)
