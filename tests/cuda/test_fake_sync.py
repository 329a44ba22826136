"""Packing, unpacking, digests and coverage of a sync on CUDA tensors that are not there: no devices are mixed."""

import pytest
import torch

from tests.cuda.fake_tensors import fake_cuda
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import cut_messages
from weightsync.plans.plan import make_plan
from weightsync.transfer import digest
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.transports.packing import Packer
from weightsync.transfer.transports.transport import message_digest

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
TRAINER_GPU, ROLLOUT_GPU = "cuda:2", "cuda:3"  # not 0: what names no device would be there


def test_a_mix_of_devices_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch) as recorded:
        here = torch.zeros(4, device=TRAINER_GPU)
        with pytest.raises(RuntimeError):
            here.add(torch.zeros(4, device=ROLLOUT_GPU))
        here.copy_(torch.zeros(4))
    assert [each.devices for each in recorded.mixed()] == [(TRAINER_GPU, ROLLOUT_GPU), (TRAINER_GPU, "cpu")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sync_stays_on_the_device_of_its_rank(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.from_config(CONFIG)
    source = megatron_layout(spec, Parallel(tensor=2))
    target = sglang_layout(spec, Parallel(tensor=2, expert=2))
    # The bytes of a digest come from the device's values, which a fake has not.
    monkeypatch.setattr(digest.WordSums, "digest", lambda self: bytes(16))
    with fake_cuda(monkeypatch) as recorded:
        sent = {n: torch.empty(s, dtype=dtype, device=TRAINER_GPU) for n, s in source.parameters_of(0).items()}
        taken = {n: torch.empty(s, dtype=dtype, device=ROLLOUT_GPU) for n, s in target.parameters_of(1).items()}
        sender, receiver = Packer(source, sent, "src"), Packer(target, taken, "dst")
        for message in cut_messages(make_plan(source, target), 2**16):
            for rank, packer, device in ((message.src, sender, TRAINER_GPU), (message.dst, receiver, ROLLOUT_GPU)):
                if rank != (0 if packer is sender else 1):
                    continue
                payload = torch.empty(packer.payload_bytes(message), dtype=torch.uint8, device=device)
                packer.pack(message, payload) if packer is sender else packer.unpack(message, payload)
                message_digest(packer, message)
        coverage = Coverage(target, 1, "rollout-0/1")
        coverage.check(taken)
        coverage.zero_padding(taken)
    assert recorded.mixed() == []
    assert recorded.on("cuda:0") == 0
    assert recorded.on(TRAINER_GPU) > 100
    assert recorded.on(ROLLOUT_GPU) > 100
