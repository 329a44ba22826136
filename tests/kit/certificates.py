"""Authorities and certificates for tests, made with `cryptography`."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from servicekit.security.certificates import TlsFiles, role_name

DAY = datetime.timedelta(days=1)


def utc_now() -> datetime.datetime:
    """Return the time in UTC, as certificates hold it."""
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    chain: bytes
    key: bytes


class Authority:
    """A certificate authority; `issuer` makes it an intermediate one."""

    def __init__(self, name: str, issuer: "Authority | None" = None, *, ends: datetime.timedelta = 30 * DAY) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = self if issuer is None else issuer
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._issuer._sign(
            _unsigned(self._key, self.subject, -30 * DAY, ends).add_extension(x509.BasicConstraints(True, None), True)
        )

    @property
    def pem(self) -> bytes:
        """The authority's certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        names: Sequence[str],
        *,
        subject: str | None = None,
        begins: datetime.timedelta = -DAY,
        ends: datetime.timedelta = DAY,
        addresses: Sequence[ipaddress.IPv4Address | ipaddress.IPv6Address] = (),
    ) -> Pair:
        """Issue a certificate for DNS `names` and IP `addresses`, valid from now + `begins` to now + `ends`."""
        key = ec.generate_private_key(ec.SECP256R1())
        common_name = subject if subject is not None else (names[0] if names else "nobody")
        unsigned = _unsigned(key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]), begins, ends)
        if names:
            held = [*(x509.DNSName(name) for name in names), *(x509.IPAddress(address) for address in addresses)]
            unsigned = unsigned.add_extension(x509.SubjectAlternativeName(held), critical=False)
        chain = self._sign(unsigned).public_bytes(serialization.Encoding.PEM)
        chain += b"" if self._issuer is self else self.pem
        return Pair(chain, _key_pem(key))

    def _sign(self, unsigned: x509.CertificateBuilder) -> x509.Certificate:
        return unsigned.issuer_name(self.subject).sign(self._key, hashes.SHA256())


def write_files(folder: Path, pair: Pair, authorities: bytes) -> TlsFiles:
    """Write tls.crt, tls.key and ca.crt, or replace each of them atomically."""
    folder.mkdir(exist_ok=True)
    for name, content in (("tls.crt", pair.chain), ("tls.key", pair.key), ("ca.crt", authorities)):
        temporary = folder / f"{name}.new"
        temporary.write_bytes(content)
        temporary.replace(folder / name)
    return TlsFiles(certificate=folder / "tls.crt", key=folder / "tls.key", authorities=folder / "ca.crt")


def files_of(folder: Path, authority: Authority, role: str) -> TlsFiles:
    """Write valid files for a process of `role`, in a folder of its own."""
    return write_files(folder / role, authority.issue([role_name(role)]), authority.pem)


def variables(files: TlsFiles) -> dict[str, str]:
    """Return the environment of a process that uses the files."""
    return {
        "TANDEM_TLS_CERT": str(files.certificate),
        "TANDEM_TLS_KEY": str(files.key),
        "TANDEM_TLS_CA": str(files.authorities),
    }


def _unsigned(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, begins: datetime.timedelta, ends: datetime.timedelta
) -> x509.CertificateBuilder:
    now = utc_now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
