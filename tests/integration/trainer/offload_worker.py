"""One rank of the tests of offloaded memory: the same work without and with it. Arguments: those of parity_worker."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem_config.schema import RunConfig
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.checkpoints.parts import values_of
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.step.offload import CHECKPOINT, STEP
from weightsync.transfer.tensors import tensor_checksums

ALL = {"parameters": True, "gradients": True, "optimizer": True}


def run_case(case: dict[str, Any], out: Path) -> None:
    for name in case["offload"]:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        engine = make(case, ALL if name == "all" else {}, folder)
        report = work(engine, Path(case["model"]), folder)
        engine.close()
        engine = make(case, ALL if name == "all" else {}, folder)
        report["given"].append(resumed(engine, folder))
        engine.close()
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


def make(case: dict[str, Any], offload: dict[str, bool], folder: Path) -> MegatronEngine:
    model = {"path": case["model"], "dtype": case["dtype"]}
    grpo = CONFIG["grpo"] | {"kl_coefficient": 0.05, "kl_estimator": "k3", "reference_path": case["reference"]}
    trainer = CONFIG["trainer"] | case["layout"] | {"offload": offload}
    config = RunConfig.model_validate(CONFIG | {"model": model, "trainer": trainer, "grpo": grpo})
    return MegatronEngine(config, torch.device("cpu"), folder)


def work(engine: MegatronEngine, model: Path, folder: Path) -> dict[str, Any]:
    """Steps, log-probs, a checkpoint that is read again. Returns: what all of it gives, and memory meanwhile."""
    engine.load(model)
    # what a round begins with, where KL is in the reward: nothing has computed with the policy yet
    given: list[Any] = [engine.logprobs(make_samples(), reference=True)[0].tolist()]
    idle = resident_bytes()
    for number in range(2):
        given.append(dict(engine.train_step(make_samples(seed=number), NUM_UPDATES).metrics))
        given.append(engine.logprobs(make_samples())[0].tolist())
        given.append(engine.logprobs(make_samples(), reference=True)[0].tolist())
    # what the first steps make for good, like optimizer tables, is no growth
    after = resident_bytes()
    engine.save(folder / "checkpoint")
    given.append(dict(engine.train_step(make_samples(seed=8), NUM_UPDATES).metrics))
    engine.load_checkpoint(folder / "checkpoint")
    given.append(dict(engine.train_step(make_samples(seed=9), NUM_UPDATES).metrics))
    engine.export(folder / "hf")
    held = held_bytes(engine)
    with engine._offload.use(*CHECKPOINT, changes=False):
        checksums = tensor_checksums({name: values_of(state) for name, state in engine._adam.tensors().items()})
    with engine._offload.use(*STEP):
        for parameter in engine._parameters.values():
            parameter.main_grad.zero_()  # memory counts when it is written
        used, in_use = held_bytes(engine), resident_bytes()
    return {
        "given": [without_timings(each) for each in given],
        "checksums": checksums,
        "held": held,
        "used": used,
        "resident": {"idle": idle, "after": after, "in_use": in_use, "last": resident_bytes()},
    }


def resumed(engine: MegatronEngine, folder: Path) -> list[float]:
    """What a resumed run's first round begins with."""
    engine.load_checkpoint(folder / "checkpoint")
    logprobs: list[float] = engine.logprobs(make_samples(), reference=True)[0].tolist()
    return logprobs


def without_timings(given: Any) -> Any:
    """Without what measures the machine."""
    measured = ("tokens_per_s", "utilization", "peak")
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if not any(part in name for part in measured)}


def held_bytes(engine: MegatronEngine) -> int:
    """Bytes of weights, gradients and AdamW's moments and masters."""
    tensors = [tensor for tensor in map(values_of, engine._adam.tensors().values()) if tensor.dim() > 0]
    tensors += [parameter.main_grad for parameter in engine._parameters.values()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    run_all(run_case)
