"""The developer's tools report what is wrong, and above all never call an empty test run a success."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository import REPO
from tools import check_venv, proto, test_summary

BUF = Path(sys.executable).parent / "buf"
TOOL_TIMEOUT_S = 60.0

PASSED = '<testcase classname="t" name="a"/>'
FAILED = '<testcase classname="t" name="b"><failure/></testcase>'
ERROR = '<testcase classname="t" name="c"><error/></testcase>'
SKIPPED = '<testcase classname="t" name="d"><skipped/></testcase>'
PASSED_THEN_ERROR = '<testcase classname="t" name="e"/><testcase classname="t" name="e"><error/></testcase>'


@pytest.mark.parametrize(
    ("cases", "line", "status"),
    [
        (PASSED, "1 passed, 0 failed, 0 skipped", 0),
        (PASSED + SKIPPED, "1 passed, 0 failed, 1 skipped", 0),
        (PASSED + FAILED + ERROR, "1 passed, 2 failed, 0 skipped", 1),
        (PASSED_THEN_ERROR, "0 passed, 1 failed, 0 skipped", 1),
        (SKIPPED, "0 passed, 0 failed, 1 skipped", 1),
        ("", "0 passed, 0 failed, 0 skipped", 1),
    ],
)
def test_the_summary_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cases: str, line: str, status: int
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert test_summary.main([str(report)]) == status
    assert capsys.readouterr().out.strip() == line


@pytest.mark.parametrize("text", [None, "", "<testsuites><testsuite>"])
def test_a_missing_or_cut_report_is_no_success(tmp_path: Path, text: str | None) -> None:
    report = tmp_path / "report.xml"
    if text is not None:
        report.write_text(text)
    assert test_summary.main([str(report)]) == 1


def test_the_environment_is_as_pinned() -> None:
    assert check_venv.main() == 0


def test_a_wrong_or_missing_package_is_named() -> None:
    lines = check_venv.wrong_packages({"torch": "0.0.1", "no-such-package": "1", "pytest": "9.2.0"})
    assert len(lines) == 2
    assert "torch is 2." in lines[0]
    assert "no-such-package is missing" in lines[1]


@pytest.mark.parametrize("line", ["torch>=2", "torch", "torch=="])
def test_only_exact_pins_are_pins(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock.txt").write_text(f"# a comment\nnumpy==2.4.6  # why\n{line}\n")
    with pytest.raises(ValueError, match="not name==version"):
        check_venv.read_pins(tmp_path / "lock.txt")


def test_generated_code_is_what_the_protos_say() -> None:
    assert proto.check() == 0


def test_a_change_by_hand_is_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto.generate(tmp_path)
    init = tmp_path / proto.PACKAGE / "__init__.py"
    init.write_text("# by hand\n")
    monkeypatch.setattr(proto, "REPO", tmp_path)
    assert proto.check() == 1


def test_buf_refuses_an_unversioned_package(tmp_path: Path) -> None:
    (tmp_path / "buf.yaml").write_text((REPO / "buf.yaml").read_text())
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "x.proto").write_text('syntax = "proto3";\npackage x;\nmessage bad_name {}\n')
    done = subprocess.run([BUF, "lint"], cwd=tmp_path, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    assert done.returncode != 0
    assert "bad_name" in done.stdout


def buf_breaking(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(BUF), "breaking", "--against", str(REPO / "protos/wire.binpb")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("string step_id = 1;", "string step_id = 77;", '"1" with name "step_id"'),
        ("string step_id = 1;", "bytes step_id = 1;", "step_id"),
        ("rpc TrainStep(", "rpc Train(", "TrainStep"),
    ],
)
def test_a_wire_that_breaks_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    """A renumbered field, another type, a missing RPC: what was agreed on is in protos/wire.binpb."""
    shutil.copy(REPO / "buf.yaml", tmp_path)
    shutil.copytree(REPO / "protos", tmp_path / "protos")
    assert buf_breaking(tmp_path).returncode == 0
    file = tmp_path / "protos/tandem_api/trainer/v1/trainer.proto"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    done = buf_breaking(tmp_path)
    assert done.returncode != 0
    assert complaint in done.stdout


def package(folder: Path, name: str, *, size: int) -> Path:
    """A package of one module of 4 bytes, whose list of files says `size`. Returns: the folder of its metadata."""
    (folder / f"{name}.py").write_text("a=1\n")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}.py,,{size}\n{name}-1.0.dist-info/METADATA,,999\n../../../bin/x,,1\n")
    (folder / "../../../bin/x").resolve().write_text("a script")
    return info


def test_packages_that_are_not_whole_are_forgotten(tmp_path: Path) -> None:
    """pip takes them for installed, or refuses to replace them: what an interrupted `make venv` left stayed broken."""
    folder = tmp_path / "lib/python3/site-packages"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    whole, cut, unlisted, lost = (
        package(folder, name, size=size) for name, size in (("whole", 4), ("cut", 9), ("unlisted", 4), ("lost", 4))
    )
    (unlisted / "RECORD").unlink()
    (folder / "lost.py").unlink()
    assert sorted(check_venv.damaged(folder)) == ["cut", "lost", "unlisted"]
    assert check_venv.repair(folder) == 0
    assert [info.is_dir() for info in (whole, cut, unlisted, lost)] == [True, False, False, False]
