"""A trainer of one rank continues from shards of four ranks, and from what it had when it refuses them."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servicekit.errors import ConfigError, Internal
from tandem_config.schema import RunConfig
from tandem_files.atomic import SPARE_BYTES
from tandem_files.digests import damages, file_digest, read_manifest, write_manifest
from tandem_files.run_folder import note_launch
from tests.kit.checkpoints import read_rank, unread
from tests.kit.folders import small_disk
from tests.kit.models import save_model
from tests.kit.stores import Tensors, same
from tests.unit.trainer.batches import random_samples
from trainer_service.checkpoints.files import META, file_of, read_meta
from trainer_service.checkpoints.importing import import_policy
from trainer_service.checkpoints.parts import values_of
from trainer_service.checkpoints.writing import SavedFile
from trainer_service.engine import Saving
from trainer_service.megatron_engine.adam_state import _GroupSteps
from trainer_service.megatron_engine.checkpoint import _write_and_publish
from trainer_service.megatron_engine.engine import MegatronEngine
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.transfer.tensors import poison_tensors

# it builds real engines
pytestmark = pytest.mark.timeout(120)
FOUR = Parallel(tensor=2, pipeline=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2-tied", folder)
    return folder


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def engine(model: Path, one_rank: None) -> Iterator[MegatronEngine]:
    """An engine that has done two updates."""
    made = MegatronEngine(run_config(model), torch.device("cpu"))
    made.load(model)
    step(made)
    yield made
    made.close()


def run_config(model: Path, **trainer: object) -> RunConfig:
    sections = {"model": {"path": model, "dtype": "float32"}, "data": {"train": "none.jsonl"}, "trainer": trainer}
    return RunConfig.model_validate(sections)


def step(engine: MegatronEngine) -> dict[str, float]:
    return dict(engine.train_step(random_samples(), 2).metrics)


def with_digests(folder: Path) -> Path:
    """Write the digests of a folder's files as they are."""
    (folder / "digests.json").unlink()
    write_manifest(folder, {path.name: file_digest(path) for path in folder.iterdir()})
    return folder


@pytest.mark.parametrize("name", ["shard-tp00-pp00.safetensors", META])
def test_files_of_two_steps_are_not_read_together(one_rank: None, model: Path, tmp_path: Path, name: str) -> None:
    """Even if their digests are made to fit, and there are no step counts of AdamW to tell them apart."""
    engine = MegatronEngine(run_config(model, checkpoint_optimizer=False), torch.device("cpu"))
    engine.load(model)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        step(engine)
        engine.save(folder)
    shutil.copy(folders[0] / name, folders[1] / name)
    before = {key: tensor.clone() for key, tensor in engine.tensors().items()}
    with pytest.raises(
        ConfigError, match=r"shard-tp00-pp00\.safetensors is of policy version \d .*files are of different"
    ):
        engine.load_checkpoint(with_digests(folders[1]))
    assert same(dict(engine.tensors()), before) == []
    engine.load_checkpoint(folders[0])
    engine.close()


def test_files_of_two_runs_are_not_read_together(one_rank: None, model: Path, tmp_path: Path) -> None:
    saved = []
    for run_id in ("a-1", "b-1"):
        note_launch(make_folder(tmp_path / run_id), run_id)
        engine = MegatronEngine(run_config(model), torch.device("cpu"), tmp_path / run_id)
        engine.load(model)
        engine.save(tmp_path / run_id / "checkpoint")
        engine.close()
        saved.append(tmp_path / run_id / "checkpoint")
    engine = MegatronEngine(run_config(model), torch.device("cpu"))
    shutil.copy(saved[0] / "shard-tp00-pp00.safetensors", saved[1])
    with pytest.raises(
        ConfigError, match=r"of policy version 0 of run 'a-1', and meta\.json of policy .* of run 'b-1'"
    ):
        engine.load_checkpoint(with_digests(saved[1]))
    # A file of an older release among those of a run.
    held = load_file(saved[1] / "shard-tp00-pp00.safetensors")
    save_file(held, saved[1] / "shard-tp00-pp00.safetensors")
    with pytest.raises(ConfigError, match=r"is without a mark, and meta\.json of policy version 0 of run 'b-1'"):
        engine.load_checkpoint(with_digests(saved[1]))
    # All of it is of an older release.
    meta = json.loads((saved[1] / META).read_text())
    (saved[1] / META).write_text(json.dumps({key: value for key, value in meta.items() if key != "run_id"}))
    engine.load_checkpoint(with_digests(saved[1]))
    engine.close()


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def at_four_ranks(folder: Path, spec: ModelSpec, out: Path) -> Path:
    """The same checkpoint as a trainer of TP2 x PP2 would have written it."""
    out.mkdir()
    files: dict[str, Tensors] = {}
    for rank in range(FOUR.world_size):
        tensors = unread(spec, FOUR, rank, torch.float32)
        for key, tensor in read_rank(folder, spec, FOUR, rank, tensors).items():
            files.setdefault(file_of(key.partition("/")[2], rank, FOUR), {})[key] = tensor
    for name, held in files.items():
        save_file(held, out / name)
    (out / META).write_text(json.dumps(read_meta(folder) | {"parallel": FOUR.sizes()}))
    write_manifest(out, {path.name: file_digest(path) for path in out.iterdir()})
    return out


def test_training_goes_on_from_shards_of_four_ranks(engine: MegatronEngine, tmp_path: Path) -> None:
    engine.save(tmp_path / "one")
    four = at_four_ranks(tmp_path / "one", engine.spec, tmp_path / "four")
    expected = [step(engine) for _ in range(3)]
    engine.load_checkpoint(four)
    assert engine.policy_version == 1
    assert [step(engine) for _ in range(3)] == expected


@pytest.mark.parametrize("fault", ["damage", "model", "missing"])
def test_a_refused_checkpoint_changes_nothing(engine: MegatronEngine, tmp_path: Path, fault: str) -> None:
    engine.save(tmp_path / "one")
    four = at_four_ranks(tmp_path / "one", engine.spec, tmp_path / "four")
    step(engine)
    engine.save(tmp_path / "two")
    expected = step(engine)
    engine.load_checkpoint(tmp_path / "two")
    shard = four / "shard-tp01-pp01.safetensors"
    if fault == "damage":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        says = r"DamagedCheckpoint: .*shard-tp01-pp01\.safetensors has other bytes"
    elif fault == "missing":
        shard.unlink()
        says = r"DamagedCheckpoint: .*shard-tp01-pp01\.safetensors is missing"
    else:
        meta = read_meta(four)
        (four / META).write_text(json.dumps(meta | {"model": meta["model"] | {"num_layers": 99}}))
        write_manifest(four, {path.name: file_digest(path) for path in four.iterdir() if path.name != "digests.json"})
        says = r"ConfigError: .* of another run than this: .*num_layers: 99 in the checkpoint, 4 in the run"
    with pytest.raises(ConfigError) as refused:
        engine.load_checkpoint(four)
    assert re.search(says, f"{type(refused.value).__name__}: {refused.value}")
    assert step(engine) == expected


def test_step_counts_that_the_optimizer_cannot_hold_are_refused_before_weights_change(
    engine: MegatronEngine, tmp_path: Path
) -> None:
    """TransformerEngine's AdamW has one count for a group of parameters."""
    engine.save(tmp_path / "one")
    shard = tmp_path / "one" / "shard-tp00-pp00.safetensors"
    held_there = load_file(shard)
    next(tensor for name, tensor in held_there.items() if name.startswith("step/")).fill_(99.0)
    save_file(held_there, shard)
    write_manifest(tmp_path / "one", {path.name: file_digest(path) for path in (shard, tmp_path / "one" / META)})
    step(engine)
    before = {name: values_of(tensor).clone() for name, tensor in engine._adam.tensors().items()}
    counted = [tensor for name, tensor in before.items() if name.startswith("step/")]
    engine._adam._group_steps = [
        _GroupSteps(
            group={"step": int(counted[0])},
            tensors=[values_of(t) for name, t in engine._adam.tensors().items() if name.startswith("step/")],
        )
    ]
    for refuse in (engine.check_checkpoint, engine.load_checkpoint):
        with pytest.raises(ConfigError, match="AdamW's step counts differ among parameters"):
            refuse(tmp_path / "one")
        after = {name: values_of(tensor) for name, tensor in engine._adam.tensors().items()}
        assert same(after, before) == []


def test_a_file_that_rank_0_cannot_write_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a note, which may be as impossible to write."""

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("trainer_service.checkpoints.writing._leave", broken)
    monkeypatch.setattr("trainer_service.checkpoints.writing.Path.touch", broken)
    monkeypatch.setattr("trainer_service.megatron_engine.checkpoint.WAIT_S", 5.0)
    (tmp_path / "partial" / "shard.safetensors").mkdir(parents=True)
    file = SavedFile(name="shard.safetensors", tensors={"weights/a": torch.zeros(2)})
    with pytest.raises(Internal, match=r"cannot write checkpoint .*: .*[Ii]s a directory"):
        _write_and_publish(tmp_path / "partial", [file], 2, tmp_path / "trainer", {})
    assert not (tmp_path / "partial").exists()


def test_a_checkpoint_of_weights_alone_starts_the_optimizer_anew(
    engine: MegatronEngine, model: Path, tmp_path: Path
) -> None:
    engine._config = run_config(model, checkpoint_optimizer=False)
    engine.save(tmp_path / "weights")
    engine._config = run_config(model)
    saved = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    assert engine.save(tmp_path / "full") > 2.5 * sum(path.stat().st_size for path in (tmp_path / "weights").iterdir())
    step(engine)
    engine.load_checkpoint(tmp_path / "weights")
    assert same(dict(engine.tensors()), saved) == []
    assert engine.policy_version == 1
    state = {name: held for name, held in engine._adam.tensors().items() if not name.startswith("weights/")}
    assert not any(values_of(held).any() for held in state.values())


def test_a_checkpoint_without_extra_has_no_random_states_and_starts_the_schedule_anew(
    engine: MegatronEngine, model: Path, tmp_path: Path
) -> None:
    settings = {"warmup_iterations": 4, "learning_rate": 0.8}
    engine.save(tmp_path / "full")
    engine._config = run_config(model, checkpoint_extra=False, **settings)
    engine.save(tmp_path / "one")
    full, one = (load_file(tmp_path / name / "shard-tp00-pp00.safetensors") for name in ("full", "one"))
    extra = {name for name in full if name.startswith("rng/")}
    assert "rng/cpu" in extra
    assert same(one, {name: tensor for name, tensor in full.items() if name not in extra}) == []
    assert set(read_meta(tmp_path / "full")) - set(read_meta(tmp_path / "one")) == {"steps_done", "skipped_updates"}

    step(engine)
    torch.rand(1)  # another random state than that of `full`
    assert engine._learning_rate() == pytest.approx(0.6)  # two of four steps of the warm-up are done
    engine._skipped_updates, random = 3, torch.get_rng_state()
    engine.load_checkpoint(tmp_path / "one")
    assert torch.equal(torch.get_rng_state(), random)
    assert same({name: values_of(held) for name, held in engine._adam.tensors().items()}, one) == []  # AdamW's too
    assert (engine.policy_version, engine._skipped_updates) == (1, 0)
    assert engine._learning_rate() == pytest.approx(0.2)
    engine.load_checkpoint(tmp_path / "full")
    assert not torch.equal(torch.get_rng_state(), random)
    assert engine._learning_rate() == pytest.approx(0.4)


def test_without_room_nothing_is_written_and_the_one_before_stays(engine: MegatronEngine, tmp_path: Path) -> None:
    size = engine.save(tmp_path / "size")
    with small_disk(tmp_path / "small", str(SPARE_BYTES + size * 3 // 2)) as disk:
        engine.save(disk / "one")
        with pytest.raises(Internal, match=r"cannot write checkpoint .*No space left on device: \d+ MiB are needed"):
            engine.save(disk / "two")
        assert [path.name for path in disk.iterdir()] == ["one"]
        step(engine)
        engine.load_checkpoint(disk / "one")
        assert engine.policy_version == 1


def held(folder: Path) -> Tensors:
    """The tensors of a checkpoint of one rank, whose files are as they were written."""
    assert damages(folder, read_manifest(folder)) == []
    return load_file(folder / "shard-tp00-pp00.safetensors")


def test_a_checkpoint_beside_the_training_has_the_bytes_of_its_moment(engine: MegatronEngine, tmp_path: Path) -> None:
    engine.save(tmp_path / "now")
    written = [engine.begin_save(tmp_path / "beside"), step(engine), engine.saving][-1]
    assert isinstance(written, Saving)
    assert written.done.result(60) > 0
    now = held(tmp_path / "now")
    assert same(held(tmp_path / "beside"), now) == []
    expected = step(engine)
    engine.begin_save(tmp_path / "later")
    engine.begin_save(tmp_path / "beside")  # waits for the other, and replaces
    last = engine.saving
    assert last is not None
    assert last.done.result(60) > 0
    assert same(held(tmp_path / "later"), held(tmp_path / "beside")) == []
    assert same(held(tmp_path / "later"), now) != []
    engine.load_checkpoint(tmp_path / "now")
    step(engine)
    assert step(engine) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "later", "now"]


def test_a_run_starts_from_an_imported_checkpoint_as_from_its_model(
    engine: MegatronEngine, model: Path, tmp_path: Path
) -> None:
    engine.load(model)
    expected = step(engine)
    import_policy(model, engine.spec, FOUR, torch.float32, tmp_path / "imported")
    engine._config = run_config(model, initial_checkpoint=tmp_path / "imported")
    poison_tensors(engine.tensors())
    engine.load(model)
    assert engine.policy_version == 0
    assert step(engine) == expected
