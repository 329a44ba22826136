"""Ranks that do not fit refuse each other before they connect, with both values."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from servicekit.errors import ConfigError, Unavailable
from weightsync.membership.nccl_settings import NCCL_SETTINGS
from weightsync.transfer.facts import check_facts, own_facts

SLOTS = ("trainer/0", "trainer/1", "rollout-0/0", "rollout-1/0")
GPU = {
    **own_facts(torch.device("cpu")),
    "device": "cuda",
    "NCCL": "2.27.3",
    "NCCL_CUMEM_ENABLE": "0",
}

Change = dict[str, str | None]


def told(**of_slot: Change) -> dict[str, str]:
    """All alike, but what is given by slot (with _ for / and -)."""
    changes = {slot: of_slot.get(slot.replace("/", "_").replace("-", "_"), {}) for slot in SLOTS}
    return {
        slot: json.dumps({name: v for name, v in {**GPU, **change}.items() if v}) for slot, change in changes.items()
    }


def test_ranks_that_are_alike_meet() -> None:
    check_facts(told(), SLOTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"NCCL": "2.26.2"}, "NCCL must match: rollout-0/0 has 2.26.2, trainer/0 has 2.27.3"),
        ({"NCCL_CUMEM_ENABLE": "1"}, "NCCL_CUMEM_ENABLE must match: rollout-0/0 has 1, trainer/0 has 0 (set the same"),
        ({"torch": "2.7"}, f"torch must match: rollout-0/0 has 2.7, trainer/0 has {GPU['torch']}"),
        ({"C++ ABI": "7"}, "C++ ABI must match: rollout-0/0 has 7"),
        ({"plan format": "99"}, "plan format must match: rollout-0/0 has 99, trainer/0 has 1"),
        ({"tandem": "9.9.9"}, f"tandem must match: rollout-0/0 has 9.9.9, trainer/0 has {GPU['tandem']}"),
        ({"byte order": "big"}, "byte order must match: rollout-0/0 has big"),
        ({"device": "cpu", "NCCL": None}, "NCCL must match: rollout-0/0 has nothing, trainer/0 has 2.27.3"),
        ({"device": "cpu"}, "device must match: rollout-0/0 has cpu, trainer/0 has cuda"),
        ({"something new": "1"}, "something new must match: rollout-0/0 has 1, trainer/0 has nothing"),
    ],
)
def test_a_rank_that_differs_is_named_with_both_values(change: Change, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_facts(told(rollout_0_0=change), SLOTS)
    assert message in str(caught.value)


def test_every_difference_and_everybody_who_differs_is_named() -> None:
    other: Change = {"NCCL": "2.26.2", "torch": "2.7"}
    with pytest.raises(ConfigError) as caught:
        check_facts(told(rollout_0_0=other, rollout_1_0=other, trainer_1={"NCCL_CUMEM_ENABLE": "1"}), SLOTS)
    for part in ("NCCL must match: rollout-0/0, rollout-1/0 has 2.26.2", "torch must match", "trainer/1 has 1"):
        assert part in str(caught.value)


def test_a_rank_whose_facts_are_lost_is_asked_again() -> None:
    facts = told()
    del facts["rollout-1/0"]
    with pytest.raises(Unavailable, match="rollout-1/0 does not say what it runs"):
        check_facts(facts, SLOTS)


def test_nccl_is_the_library_that_is_loaded(tmp_path: Path) -> None:
    """Seen on an H200: torch said 2.30.7, with which it was built, and the library was 2.32.3."""
    source = "int ncclGetVersion(int *version) { *version = 23203; return 0; }"
    library = tmp_path / "libnccl.so.2"
    build = ["gcc", "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(build, input=source, text=True, check=True, timeout=60)
    told = (
        "import ctypes, torch, weightsync.transfer.facts as facts; "
        "torch.cuda.nccl.version = lambda: (2, 30, 7, 'rc1'); "
        f"print(facts.nccl_version()); library = ctypes.CDLL({str(library)!r}); print(facts.nccl_version())"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, env=environ)
    # where torch brings NCCL as a library, it is loaded before the other one, whose name is the same
    own = tuple(torch.cuda.nccl.version()) if torch.version.cuda else (2, 30, 7)
    assert done.stdout.splitlines() == [str(own), str(own if torch.version.cuda else (2, 32, 3))], done.stderr


def test_what_a_process_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = own_facts(torch.device("cpu"))
    assert set(facts) == {"tandem", "plan format", "torch", "C++ ABI", "byte order", "device"}
    assert torch.__version__.startswith(facts["torch"] + ".")
    monkeypatch.setattr("weightsync.transfer.facts.nccl_version", lambda: (2, 27, 3))
    facts = own_facts(torch.device("cuda"), {**os.environ, "NCCL_PROTO": "Simple"})
    assert (facts["NCCL"], facts["NCCL_PROTO"]) == ("2.27.3", "Simple")
    assert set(NCCL_SETTINGS) <= set(facts)
