"""Weight sync by itself: a toy model goes from one process, cut as Megatron does, into another one, as SGLang keeps it.

    python -m examples.weight_sync redis://127.0.0.1:6379

Both run the same function. Neither has an engine: a layout says which slices of which tensors its memory holds.
"""

import multiprocessing
import sys
from multiprocessing.synchronize import Barrier

import torch

from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.membership.rendezvous import Rendezvous
from weightsync.model.spec import ModelSpec
from weightsync.plans.participants import Participants
from weightsync.round.phases import PHASES
from weightsync.transfer.session import SyncMember

SPEC = ModelSpec.from_config(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
)
GROUP, TIMEOUT_S = "example", 60.0


def take_part(slot: str, redis_url: str, phase_done: Barrier) -> None:
    """One round as `slot`: join the group, agree on the round, run its phases.

    No rank begins a phase, or leaves, before all have finished the one before. In a run the coordinator sees to that.
    """
    sends = slot.startswith("trainer/")
    shapes = (megatron_layout if sends else sglang_layout)(SPEC, Parallel()).parameters_of(0)
    tensors = {name: torch.randn(shape) if sends else torch.zeros(shape) for name, shape in shapes.items()}
    member = SyncMember(spec=SPEC, slot=slot, parallel=Parallel(), tensors=tensors, redis_url=redis_url, group=GROUP)
    member.start()
    round_ = pb.Round(
        round_id="first",
        policy_version=1,
        group=GROUP,
        trainer=Parallel().to_proto(),
        replicas=[pb.ReplicaSpec(name="rollout", parallel=Parallel().to_proto())],
        install_mode=pb.INSTALL_MODE_IN_PLACE,
        formation_timeout_s=TIMEOUT_S,
        transfer_timeout_s=TIMEOUT_S,
    )
    round_.epoch = Rendezvous(redis_url, GROUP).wait_for(Participants.of_round(round_).slots, TIMEOUT_S).epoch
    reports = {}
    for phase in PHASES:  # VERIFY compares digests of what is there now
        reports[phase] = member.run_phase(phase, round_)
        phase_done.wait(TIMEOUT_S)
    moved = reports[pb.ROUND_PHASE_TRANSFER]
    print(
        f"{slot}: {moved.bytes_sent:,} bytes sent, {moved.bytes_received:,} of {moved.shard_bytes:,} received",
        flush=True,
    )
    member.close()


def main() -> int:
    """Run both processes. Returns: 0 if both have committed the round."""
    context = multiprocessing.get_context("spawn")
    arguments = sys.argv[1], context.Barrier(2)
    both = [context.Process(target=take_part, args=(slot, *arguments)) for slot in ("trainer/0", "rollout/0")]
    for process in both:
        process.start()
    for process in both:
        process.join(2 * TIMEOUT_S)
    return max(abs(process.exitcode or 0) for process in both)


if __name__ == "__main__":
    sys.exit(main())
