"""Ranks write their files of a checkpoint, and rank 0 publishes what all of them have written."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from servicekit.errors import Internal
from tandem_files.digests import damages, read_manifest
from tests.kit.folders import small_disk
from trainer_service.checkpoints.writing import HostCopies, SavedFile, publish, wait_for_files, write_files


def file(name: str, num_floats: int = 64) -> SavedFile:
    return SavedFile(name=name, tensors={"weights/a": torch.arange(num_floats, dtype=torch.float32)})


def test_what_all_ranks_have_written_is_published_with_its_digests(tmp_path: Path) -> None:
    partial, folder = tmp_path / ".trainer.partial", tmp_path / "trainer"
    partial.mkdir()
    for rank in range(2):
        write_files(partial, [file(f"shard-{rank}.safetensors")])
        if rank == 0:
            with pytest.raises(Internal, match=r"1 of 2 files were not written within 0\.1 s"):
                wait_for_files(partial, 2, 0.1)
    wait_for_files(partial, 2, 0.0)
    assert publish(partial, folder, {"dtype": "float32"}) == sum(
        path.stat().st_size for path in folder.iterdir() if path.name != "digests.json"
    )
    names = {"shard-0.safetensors", "shard-1.safetensors", "meta.json"}
    assert {path.name for path in folder.iterdir()} == names | {"digests.json"}
    manifest = read_manifest(folder)
    assert set(manifest) == names
    assert damages(folder, manifest) == []


def test_a_rank_that_cannot_write_says_why_and_leaves_the_disk_to_others(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as disk:
        write_files(disk, [file("shard-0.safetensors"), file("shard-1.safetensors", 2**20)])
        with pytest.raises(Internal, match=r"shard-1\.safetensors was not written: .*No space left"):
            wait_for_files(disk, 2, 5.0)
        assert not (disk / "shard-1.safetensors").exists()
        write_files(disk / "removed meanwhile", [file("shard-0.safetensors")])  # raises nothing


def test_a_wait_ends_where_nothing_can_be_written_any_more(tmp_path: Path) -> None:
    """Then no rank can leave a note either."""
    with pytest.raises(FileNotFoundError):
        wait_for_files(tmp_path / "gone", 1, 60.0)


def test_a_note_without_room_for_its_reason_still_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, suffix: str, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer_service.checkpoints.writing._leave", full)
    write_files(tmp_path, [file("shard-1.safetensors")])
    with pytest.raises(Internal, match=r"shard-1\.safetensors was not written: its rank's log has the reason"):
        wait_for_files(tmp_path, 1, 60.0)


def test_copies_are_of_their_moment_and_use_the_same_memory_again() -> None:
    live, copies = torch.zeros(8), HostCopies()
    files = [SavedFile(name="shard", tensors={"weights/a": live, "step/a": torch.tensor(3.0)})]
    first = copies.take(files)[0].tensors
    live += 1
    assert not first["weights/a"].any()
    second = copies.take(files)[0].tensors
    assert second["weights/a"].data_ptr() == first["weights/a"].data_ptr()
    assert second["weights/a"].all()
    assert set(copies.take([SavedFile(name="shard", tensors={"weights/a": torch.ones(4)})])[0].tensors) == {"weights/a"}


def test_parts_are_gathered_into_the_kept_copies_one_at_a_time() -> None:
    """Of AdamW's state under ZeRO-1: no rank holds two whole tensors of it beside the copy."""
    copies, alive = HostCopies(), list[weakref.ref[torch.Tensor]]()
    shape = torch.empty(8, device="meta")
    files = [SavedFile(name="shard", tensors={"weights/a": torch.ones(2), "exp_avg/a": shape, "exp_avg/b": shape})]

    def parts(value: float) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("exp_avg/a", "exp_avg/b", "exp_avg/of another rank"):
            assert not any(gone() is not None for gone in alive[:-1])
            tensor = torch.full((8,), value)
            alive.append(weakref.ref(tensor))
            yield name, tensor

    addresses = set()
    for value in (1.0, 2.0):
        alive.clear()
        taken = copies.take(files, parts(value))[0].tensors
        assert sorted(taken) == ["exp_avg/a", "exp_avg/b", "weights/a"]
        assert all((taken[name] == value).all() for name in ("exp_avg/a", "exp_avg/b"))
        addresses.add(taken["exp_avg/a"].data_ptr())
    assert len(addresses) == 1
