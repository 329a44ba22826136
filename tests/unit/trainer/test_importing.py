"""A Hugging Face folder becomes a trainer checkpoint at a layout, with little memory."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from servicekit.errors import ConfigError
from tandem_files.checkpoints import inspect, mark_complete
from tandem_files.digests import damages, read_manifest
from tests.kit.checkpoints import read_rank
from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from trainer_service.checkpoints.files import read_meta
from trainer_service.checkpoints.importing import import_policy
from trainer_service.checkpoints.policy import SavedPolicy
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec

LAYOUTS = {
    "one": Parallel(),
    "tp2-dp2": Parallel(tensor=2, data=2),
    "tp2-pp2": Parallel(tensor=2, pipeline=2),
    "vpp": Parallel(pipeline=2, virtual_pipeline=2),
}
# Prints the peak of memory that is not a mapped file, beyond what the imports take, and the bytes of the checkpoint.
MEASURE = """
import sys, threading, time
from pathlib import Path
from tests.kit.stores import medium_spec
from trainer_service.checkpoints.importing import import_policy
from weightsync.layouts.layout import Parallel
import torch
torch.set_num_threads(1)
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
before, peak, done = held(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], held())
thread = threading.Thread(target=watch)
thread.start()
size = import_policy(Path(sys.argv[1]), medium_spec(), Parallel(tensor=2), torch.float32, Path(sys.argv[2]))
done.set()
thread.join()
print(peak[0] - before, size)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "tied", "experts"])
def test_every_rank_finds_its_own_in_an_imported_policy(
    tmp_path: Path, family: str, dtype: torch.dtype, layout: str
) -> None:
    spec, parallel = spec_of(family), LAYOUTS[layout]
    full = canonical_tensors(spec)
    write_model(tmp_path / "model", full)
    out = tmp_path / "step" / "trainer"
    assert import_policy(tmp_path / "model", spec, parallel, dtype, out) > 0
    assert damages(out, read_manifest(out)) == []
    meta = read_meta(out)
    assert (meta["policy_version"], meta["optimizer"], meta["extra"]) == (0, False, False)
    for target in (parallel, Parallel(tensor=2, pipeline=2)):
        held = megatron_layout(spec, target)
        for rank in range(target.world_size):
            asked = {f"weights/{name}": value for name, value in empty_like_rank(held, rank, dtype).items()}
            expected = {f"weights/{name}": value for name, value in cut(held, rank, full, dtype).items()}
            assert same(read_rank(out, spec, target, rank, asked), expected) == []
    with ExitStack() as stack:
        policy = SavedPolicy(out, spec, stack)
        assert same(dict(policy), {name: value.to(dtype) for name, value in full.items()}) == []
    mark_complete(out.parent)
    assert inspect(out.parent, deep=True) == ""
    shard = next(iter(sorted(out.glob("*.safetensors"))))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert f"{shard.name} has other bytes than were written, in weights/" in inspect(out.parent, deep=True)


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    from tests.kit.stores import medium_spec

    full = canonical_tensors(medium_spec())
    write_model(tmp_path / "model", full)
    largest = max(tensor.nbytes for tensor in full.values())
    total = sum(tensor.nbytes for tensor in full.values())
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    peak, size = map(int, done.stdout.split())
    assert size > total
    # Far below 1.3 x a rank's share and a tensor, which would be 1.3 x total / 2 + largest.
    assert peak < 2 * largest < 0.5 * total


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    del full["model.norm.weight"]
    write_model(tmp_path / "model", full)
    with pytest.raises(ConfigError, match=r"has no tensor model\.norm\.weight"):
        import_policy(tmp_path / "model", spec, Parallel(), torch.float32, tmp_path / "trainer")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def spec_of(family: str) -> ModelSpec:
    if family == "tied":
        return tiny_spec(tie_word_embeddings=True)
    if family == "qwen3":
        return tiny_spec()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    return tiny_spec("qwen3_moe", **experts)


def write_model(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
