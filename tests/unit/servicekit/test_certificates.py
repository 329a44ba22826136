"""What a person reads when a certificate is not good: the file, the subject, the date."""

import datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from servicekit.errors import ConfigError
from servicekit.security.certificates import Material, TlsFiles, read_material
from tests.kit.certificates import DAY, Authority, files_of, utc_now, write_files


def read(files: TlsFiles, role: str = "trainer", now: datetime.datetime | None = None) -> Material:
    return read_material(files, role, now if now is not None else utc_now())


def test_good_files_are_read(authority: Authority, tmp_path: Path) -> None:
    files = files_of(tmp_path, authority, "trainer")
    found = read(files)
    assert (found.subject, found.chain) == ("CN=trainer.tandem", files.certificate.read_bytes())
    assert abs(found.expires - (utc_now() + DAY)) < datetime.timedelta(minutes=5)


def test_one_certificate_may_hold_every_role(authority: Authority, tmp_path: Path) -> None:
    files = write_files(tmp_path, authority.issue(["rollout.tandem", "trainer.tandem"]), authority.pem)
    assert read(files, "trainer").fingerprint == read(files, "rollout").fingerprint


def test_a_chain_of_intermediates_leads_to_the_authority(authority: Authority, tmp_path: Path) -> None:
    low = Authority("low", Authority("middle", authority))
    pair = low.issue(["trainer.tandem"])
    missing = write_files(tmp_path, pair, authority.pem)
    with pytest.raises(ConfigError, match=r"issued by CN=low, which is not of .*ca\.crt \(that holds CN=ours\)"):
        read(missing)
    middle = low._issuer.pem
    read(write_files(tmp_path, type(pair)(pair.chain + middle, pair.key), authority.pem))


def test_while_the_authority_changes_both_are_believed(authority: Authority, tmp_path: Path) -> None:
    following = Authority("following")
    for issuer in (authority, following):
        read(write_files(tmp_path, issuer.issue(["trainer.tandem"]), authority.pem + following.pem))


def test_an_expired_certificate_is_named_with_file_subject_and_date(authority: Authority, tmp_path: Path) -> None:
    files = write_files(tmp_path, authority.issue(["trainer.tandem"], begins=-3 * DAY, ends=-DAY), authority.pem)
    day = f"{utc_now() - DAY:%Y-%m-%d}"
    with pytest.raises(ConfigError, match=rf"TANDEM_TLS_CERT={files.certificate}.*CN=trainer\.tandem expired on {day}"):
        read(files)


def test_a_certificate_of_tomorrow_asks_for_the_clock(authority: Authority, tmp_path: Path) -> None:
    files = write_files(tmp_path, authority.issue(["trainer.tandem"], begins=DAY, ends=2 * DAY), authority.pem)
    with pytest.raises(ConfigError, match=r"tls\.crt.*CN=trainer\.tandem is valid from .* clock right"):
        read(files)


def test_an_expired_authority_is_named(tmp_path: Path) -> None:
    gone = Authority("gone", ends=-DAY)
    with pytest.raises(ConfigError, match=r"TANDEM_TLS_CA=.*ca\.crt: the certificate of CN=gone expired on"):
        read(files_of(tmp_path, gone, "trainer"))


@pytest.mark.parametrize(
    ("names", "held"),
    [(["rollout.tandem", "trainer"], "rollout.tandem, trainer"), ([], "no DNS name"), (["*.tandem"], r"\*\.tandem")],
)
def test_a_certificate_for_another_name_is_told_both_names(
    authority: Authority, tmp_path: Path, names: list[str], held: str
) -> None:
    files = write_files(tmp_path, authority.issue(names, subject="trainer.tandem"), authority.pem)
    with pytest.raises(ConfigError, match=rf"tls\.crt.*CN=trainer\.tandem is for {held}, not for trainer\.tandem"):
        read(files)


def test_a_certificate_of_another_authority_is_told_both(authority: Authority, tmp_path: Path) -> None:
    files = write_files(tmp_path, Authority("others").issue(["trainer.tandem"]), authority.pem)
    with pytest.raises(ConfigError, match=r"CN=trainer\.tandem was issued by CN=others.*holds CN=ours"):
        read(files)


def test_an_authority_of_the_same_name_with_another_key_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    files = write_files(tmp_path, Authority("ours").issue(["trainer.tandem"]), authority.pem)
    with pytest.raises(ConfigError, match="was issued by CN=ours, which is not of"):
        read(files)


def test_the_key_of_another_certificate_is_named(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue(["trainer.tandem"]), authority.issue(["trainer.tandem"])
    files = write_files(tmp_path, type(pair)(pair.chain, other.key), authority.pem)
    with pytest.raises(ConfigError, match=r"TANDEM_TLS_KEY=.*tls\.key is not the key of .*CN=trainer\.tandem"):
        read(files)


def test_an_encrypted_key_is_refused_by_name(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue(["trainer.tandem"])
    key = serialization.load_pem_private_key(pair.key, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )
    files = write_files(tmp_path, type(pair)(pair.chain, locked), authority.pem)
    with pytest.raises(ConfigError, match=r"tls\.key is encrypted"):
        read(files)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_file_that_is_missing_or_no_pem_is_named_and_not_quoted(
    authority: Authority, tmp_path: Path, name: str
) -> None:
    files = files_of(tmp_path, authority, "trainer")
    path = files.certificate.parent / name
    path.write_bytes(b"-----BEGIN SECRET-----\nc2VjcmV0\n")
    with pytest.raises(ConfigError, match=rf"TANDEM_TLS_[A-Z]+={path} holds no .*PEM") as caught:
        read(files)
    assert "c2VjcmV0" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"TANDEM_TLS_[A-Z]+={path} cannot be read: No such file"):
        read(files)


def test_the_stamp_changes_when_a_secret_is_swapped_behind_its_link(authority: Authority, tmp_path: Path) -> None:
    """As kubelet does it: ..data points to a dated folder, and is replaced at once."""
    for number in (1, 2):
        write_files(tmp_path / f"dated-{number}", authority.issue(["trainer.tandem"]), authority.pem)
    (tmp_path / "data").symlink_to("dated-1")
    files = TlsFiles(
        certificate=tmp_path / "data/tls.crt", key=tmp_path / "data/tls.key", authorities=tmp_path / "data/ca.crt"
    )
    before, first = files.stamp(), read(files)
    assert files.stamp() == before
    (tmp_path / "new").symlink_to("dated-2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert files.stamp() != before
    assert read(files).fingerprint != first.fingerprint


def test_all_three_files_or_none() -> None:
    assert TlsFiles.of("", "", "") is None
    with pytest.raises(
        ConfigError, match="TANDEM_TLS_KEY is not set; mutual TLS needs TANDEM_TLS_CERT, TANDEM_TLS_KEY"
    ):
        TlsFiles.of("/a", "", "/c")
