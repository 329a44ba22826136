"""Every transport carries the same bytes; what they agree on is agreed before a byte moves."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from servicekit.errors import Aborted, ConfigError, DigestMismatch, InvalidRequest, NotReady, PeerLost, StaleVersion
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import Fleet
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel
from weightsync.transfer.transports import links, shared_memory

pytestmark = pytest.mark.integration
TWO_REPLICAS = {"rollout-0": Parallel(), "rollout-1": Parallel(tensor=2)}
NAMES = {
    pb.SYNC_TRANSPORT_AUTO: "colocated",
    pb.SYNC_TRANSPORT_COLLECTIVE: "collective",
    pb.SYNC_TRANSPORT_COLOCATED: "colocated",
    pb.SYNC_TRANSPORT_DISK: "disk",
}


def rollout_slots(them: Fleet) -> list[str]:
    return [slot for slot in them.members if not slot.startswith("trainer")]


def wrong(them: Fleet) -> list[str]:
    return [name for slot in rollout_slots(them) for name in same(them.stores[slot], them.expected(slot))]


def shift(them: Fleet) -> None:
    """A step of training: every weight changes in place."""
    for tensors in (them.full, *(them.stores[slot] for slot in them.members if slot.startswith("trainer"))):
        for tensor in tensors.values():
            tensor.mul_(1.5)


def failure(outcome: dict[str, pb.PhaseReport | Exception], kind: type[Exception]) -> str:
    """The message of the first failure of this kind."""
    return next(str(result) for result in outcome.values() if isinstance(result, kind))


@pytest.mark.parametrize("install", [pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED])
@pytest.mark.parametrize("transport", NAMES)
@pytest.mark.parametrize("trainer", [Parallel(tensor=2), Parallel(pipeline=2, data=2)])
def test_every_transport_is_exact_round_after_round(
    fleet: Callable[..., Fleet],
    tmp_path: Path,
    transport: pb.SyncTransport.ValueType,
    install: pb.InstallMode.ValueType,
    trainer: Parallel,
) -> None:
    them = fleet(trainer, TWO_REPLICAS)
    for version in (1, 2, 3):
        round_ = them.round(version, transport=transport, install_mode=install, disk_folder=str(tmp_path))
        reports = them.sync(round_)
        assert wrong(them) == []
        for slot in rollout_slots(them):
            assert reports[slot].bytes_received == reports[slot].shard_bytes
            assert reports[slot].transport == NAMES[transport]
        shift(them)


@pytest.mark.parametrize("transport", NAMES)
def test_the_trainer_casts_at_the_source(fleet: Callable[..., Fleet], tmp_path: Path, transport: int) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    for slot in rollout_slots(them):
        them.replace(slot, {name: tensor.to(torch.bfloat16) for name, tensor in them.stores[slot].items()})
    round_ = them.round(1, transport=transport, wire_dtype="bfloat16", disk_folder=str(tmp_path))
    reports = them.sync(round_)
    for slot in rollout_slots(them):
        expected = {name: tensor.to(torch.bfloat16) for name, tensor in them.expected(slot).items()}
        assert [name for name in expected if not torch.equal(them.stores[slot][name], expected[name])] == []
        assert reports[slot].bytes_received == reports[slot].shard_bytes
    assert max(report.staging_bytes for report in reports.values()) <= 2 * 4096


def test_another_dtype_is_named_before_a_byte_moves(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(1, wire_dtype="bfloat16"))
    assert {type(result) for result in outcome.values()} == {ConfigError}
    assert "rollout-0/0 holds float32, trainer/0 sends bfloat16" in failure(outcome, ConfigError)


def test_an_unknown_dtype_is_named(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    with pytest.raises(ConfigError, match="float8"):
        them.members["trainer/0"].run_phase(pb.ROUND_PHASE_PREPARE, them.round(1, wire_dtype="float8"))


def test_ranks_that_are_told_other_transports_say_so(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    outcome = them.run_each(
        pb.ROUND_PHASE_PREPARE,
        {
            "trainer/0": them.round(1, transport=pb.SYNC_TRANSPORT_COLLECTIVE),
            "rollout-0/0": them.round(1, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(tmp_path)),
        },
    )
    assert "rollout-0/0 takes SYNC_TRANSPORT_DISK" in failure(outcome, ConfigError)


def on_another_host(them: Fleet, slot: str) -> None:
    them.members[slot]._transfer._links._host_id = b"elsewhere"


def test_auto_is_collective_across_hosts(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    on_another_host(them, "rollout-1/1")
    reports = them.sync(them.round(1, transport=pb.SYNC_TRANSPORT_AUTO))
    assert {report.transport for report in reports.values()} == {"collective"}
    assert wrong(them) == []


def test_colocated_across_hosts_is_refused_by_name(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    on_another_host(them, "rollout-1/1")
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED))
    assert "rollout-1/1" in failure(outcome, ConfigError)


def test_a_descriptor_that_cannot_be_opened_is_named_and_auto_falls_back(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, key: bytes, deadline: float) -> shared_memory.OpenedMemory:
        shared_memory.open_memory(name, key, deadline)
        raise OSError("no descriptors here")

    monkeypatch.setattr(links, "open_memory", refuse)
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    asked = them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, asked)
    assert "rollout-0/0: no descriptors here" in failure(outcome, ConfigError)
    them.run(pb.ROUND_PHASE_ABORT, asked)
    reports = them.sync(them.round(2, transport=pb.SYNC_TRANSPORT_AUTO))
    assert reports["rollout-0/0"].transport == "collective"
    assert wrong(them) == []


def test_slots_stand_in_where_parameters_cannot_be_shared(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "expose_parameters", lambda tensors: None)
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    for version in (1, 2):
        reports = them.sync(them.round(version, transport=pb.SYNC_TRANSPORT_COLOCATED))
        assert wrong(them) == []
        assert 0 < reports["trainer/0"].staging_bytes <= 2 * 4096
        shift(them)


def test_memory_that_moved_is_opened_anew(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    them.sync(them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED))
    for tensor in them.stores["trainer/0"].values():
        tensor.data = tensor.data.clone()
    shift(them)
    them.sync(them.round(2, transport=pb.SYNC_TRANSPORT_COLOCATED))
    assert wrong(them) == []


def test_a_shared_trainer_sends_nothing_through_a_buffer(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    reports = them.sync(them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED))
    assert all(report.staging_bytes == 0 for report in reports.values())


def test_a_byte_changed_after_the_trainer_hashed_it_is_caught(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    round_ = them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED)
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    them.run(pb.ROUND_PHASE_TRANSFER, round_)
    them.stores["rollout-0/0"]["lm_head.weight"].view(torch.uint8)[0, 1] ^= 1
    assert "lm_head" in failure(them.run(pb.ROUND_PHASE_VERIFY, round_), DigestMismatch)


@pytest.mark.parametrize("transport", [pb.SYNC_TRANSPORT_COLOCATED, pb.SYNC_TRANSPORT_DISK])
def test_a_receiver_that_does_not_come_is_waited_for_no_longer_than_the_deadline(
    fleet: Callable[..., Fleet], tmp_path: Path, transport: int
) -> None:
    them = fleet(Parallel(), TWO_REPLICAS)
    round_ = them.round(1, transport=transport, transfer_timeout_s=0.5, disk_folder=str(tmp_path))
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    present = {slot: round_ for slot in them.members if slot != "rollout-0/0"}
    outcome = them.run_each(pb.ROUND_PHASE_TRANSFER, present)
    assert isinstance(outcome["trainer/0"], PeerLost)
    if transport == pb.SYNC_TRANSPORT_COLOCATED:
        assert "lost rollout-0/0" in str(outcome["trainer/0"])


def test_a_receiver_that_dies_is_noticed_at_once(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), TWO_REPLICAS)
    round_ = them.round(1, transport=pb.SYNC_TRANSPORT_COLOCATED, transfer_timeout_s=60)
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    them.members["rollout-0/0"]._transfer._communicators.drop()  # its connections close, as when its process is killed
    begin = time.monotonic()
    outcome = them.run_each(pb.ROUND_PHASE_TRANSFER, {"trainer/0": round_})
    assert isinstance(outcome["trainer/0"], PeerLost)
    assert time.monotonic() - begin < 20


# ---- disk ----


def published(fleet: Callable[..., Fleet], folder: Path, version: int = 7) -> Fleet:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel(), "rollout-1": Parallel(tensor=2)})
    them.sync(them.round(version, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(folder)))
    return them


def clear(them: Fleet, slot: str) -> None:
    for tensor in them.stores[slot].values():
        tensor.fill_(torch.nan)


def newest(folder: Path) -> Path:
    return folder / (folder / "LATEST").read_text()


def test_a_late_joiner_reads_its_slices(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    for slot in rollout_slots(them):
        clear(them, slot)
        assert them.members[slot].load_published(tmp_path, at_least=7) == 7
    assert wrong(them) == []


def test_files_are_plain_safetensors(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    with safe_open(str(newest(tmp_path) / "rank-1.safetensors"), framework="pt") as file:
        key = next(key for key in file.keys() if key.startswith("model.layers.0.self_attn.o_proj.weight|"))  # noqa: SIM118
        columns = key.rsplit("|", 1)[1].split("+")
        begin, width = map(int, columns)
        expected = them.full["model.layers.0.self_attn.o_proj.weight"][:, begin : begin + width]
        assert torch.equal(file.get_tensor(key), expected)


def test_nothing_published_says_so(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    with pytest.raises(NotReady, match="LATEST"):
        them.members["rollout-0/0"].load_published(tmp_path, at_least=0)


def test_a_version_of_the_same_number_from_another_round_is_refused(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    them = published(fleet, tmp_path)
    member = them.members["rollout-0/0"]
    with pytest.raises(NotReady, match="was published by round round-7, not another"):
        member.load_published(tmp_path, at_least=7, round_id="another")
    assert member.load_published(tmp_path, at_least=7, round_id="round-7") == 7


def test_a_rollout_never_goes_back_through_the_disk(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    with pytest.raises(StaleVersion, match="version 7"):
        them.members["rollout-0/0"].load_published(tmp_path, at_least=8)


def test_a_flipped_byte_on_disk_is_named(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    path = newest(tmp_path) / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"rank-0\.safetensors: block 0"):
        them.members["rollout-0/0"].load_published(tmp_path, at_least=0)


def test_a_torn_file_is_named(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    path = newest(tmp_path) / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DigestMismatch, match=r"rank-1\.safetensors.*torn"):
        them.members["rollout-0/0"].load_published(tmp_path, at_least=0)


def test_files_of_another_version_do_not_pass(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path)
    old = (newest(tmp_path) / "rank-0.json").read_bytes()
    shift(them)
    them.sync(them.round(8, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(tmp_path)))
    (newest(tmp_path) / "rank-0.json").write_bytes(old)
    with pytest.raises(DigestMismatch, match=r"rank-0\.json does not belong"):
        them.members["rollout-0/0"].load_published(tmp_path, at_least=0)


def test_old_versions_are_removed(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = published(fleet, tmp_path, version=1)
    for version in (2, 3):
        them.sync(them.round(version, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(tmp_path)))
    assert sorted(path.name[:3] for path in tmp_path.glob("v*")) == ["v2-", "v3-"]


def test_what_a_round_has_not_written_stays(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """The folder may hold other things, also such as are called like versions."""
    kept = [tmp_path / "v0-thesis" / "text.txt", tmp_path / "v1-a" / "sub" / "x", tmp_path / "vb-c" / "rank-0.json"]
    for each in kept:
        each.parent.mkdir(parents=True)
        each.write_text("years of work")
    (tmp_path / "v3-link").symlink_to(kept[0].parent)
    them = published(fleet, tmp_path, version=1)
    them.sync(them.round(2, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(tmp_path)))
    assert all(each.read_text() == "years of work" for each in kept)


def test_rounds_write_into_the_runs_folder_of_weights_only(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    for version, folder in enumerate(("", "weights", "/nonexistent/x", f"{tempfile.gettempdir()}/../usr")):
        round_ = them.round(version, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=folder)
        outcome = them.run(pb.ROUND_PHASE_PREPARE, round_)
        assert {type(result) for result in outcome.values()} == {InvalidRequest}, folder
        them.run(pb.ROUND_PHASE_ABORT, round_)
        with pytest.raises(InvalidRequest):
            them.members["rollout-0/0"].load_published(Path(folder), at_least=0)


def test_a_round_whose_id_leaves_the_folder_is_refused(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    folder = tmp_path / "weights"
    folder.mkdir()
    round_ = them.round(1, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(folder), round_id="x/../../out")
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    outcome = them.run(pb.ROUND_PHASE_TRANSFER, round_)
    assert {type(result) for result in outcome.values()} == {InvalidRequest}
    assert sorted(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_written_is_named(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    round_ = them.round(1, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(tmp_path / "weights"))
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    (tmp_path / "weights").write_text("")
    outcome = them.run(pb.ROUND_PHASE_TRANSFER, round_)
    assert "trainer/0: cannot write" in str(outcome["rollout-0/0"])
    assert isinstance(outcome["rollout-0/0"], Aborted)
