"""Reads and checks the certificate, the key and the authorities of a process."""

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from servicekit.errors import ConfigError

CERT, KEY, CA = "TANDEM_TLS_CERT", "TANDEM_TLS_KEY", "TANDEM_TLS_CA"
# Names in our certificates are of roles, not of hosts: pods come and go at any address.
_DOMAIN = "tandem"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files: a certificate with its intermediates, its key, and the trusted authorities."""

    certificate: Path
    key: Path
    authorities: Path

    @classmethod
    def of(cls, certificate: str, key: str, authorities: str) -> "TlsFiles | None":
        """Make the set of files. Returns: None if all are empty: no TLS. Raises: ConfigError: one is missing."""
        given = {CERT: certificate, KEY: key, CA: authorities}
        missing = [name for name, value in given.items() if not value]
        if len(missing) == len(given):
            return None
        if missing:
            raise ConfigError(f"environment variable {missing[0]} is not set; mutual TLS needs {', '.join(given)}")
        return cls(certificate=Path(certificate), key=Path(key), authorities=Path(authorities))

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes with the files, also behind a symbolic link as in the volume of a Secret.

        Raises: OSError: a file is missing.
        """
        found = [path.stat() for path in (self.certificate, self.key, self.authorities)]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)


@dataclass(frozen=True, kw_only=True)
class Material:
    """The parts of a handshake, in PEM, and their description for logs; `fingerprint` is of all three parts."""

    chain: bytes
    key: bytes
    authorities: bytes
    subject: str
    expires: datetime.datetime
    fingerprint: str


def role_name(role: str) -> str:
    """Return the name in the certificate of a role (a DNS subject alternative name).

    >>> role_name("trainer")
    'trainer.tandem'
    """
    return f"{role}.{_DOMAIN}"


def read_material(files: TlsFiles, role: str, now: datetime.datetime) -> Material:
    """Read and check the files of a process of `role`; `now` has a time zone.

    Raises: ConfigError: with the variable, the file, the subject and the dates: unreadable, not PEM, the key of another
        certificate, expired or not yet valid, for another name, or of an untrusted authority.
    """
    chain_pem, key_pem = _read(CERT, files.certificate), _read(KEY, files.key)
    authorities_pem = _read(CA, files.authorities)
    leaf, *intermediates = _certificates(CERT, files.certificate, chain_pem)
    authorities = _certificates(CA, files.authorities, authorities_pem)
    here = f"{CERT}={files.certificate}: the certificate of {_subject(leaf)}"
    _check_key(files, key_pem, leaf)
    _check_dates(here, leaf, now)
    _check_name(here, leaf, role_name(role))
    issuer = _authority(leaf, intermediates, authorities)
    if issuer is None:
        held = ", ".join(_subject(authority) for authority in authorities)
        raise ConfigError(
            f"{here} was issued by {leaf.issuer.rfc4514_string()}, which is not of {CA}={files.authorities} "
            f"(that holds {held}): peers will not accept it"
        )
    _check_dates(f"{CA}={files.authorities}: the certificate of {_subject(issuer)}", issuer, now)
    return Material(
        chain=chain_pem,
        key=key_pem,
        authorities=authorities_pem,
        subject=_subject(leaf),
        expires=leaf.not_valid_after_utc,
        fingerprint=hashlib.sha256(b"\0".join((chain_pem, key_pem, authorities_pem))).hexdigest(),
    )


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{variable}={path} cannot be read: {error.strerror}") from None


def _certificates(variable: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{variable}={path} holds no certificate in PEM form ({error})") from None


def _check_key(files: TlsFiles, pem: bytes, leaf: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(f"{KEY}={files.key} is encrypted; give the key without a password") from None
    except ValueError:  # its text may quote the key
        raise ConfigError(f"{KEY}={files.key} holds no private key in PEM form") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(
            f"{KEY}={files.key} is not the key of the certificate of {_subject(leaf)} in {CERT}={files.certificate}"
        )


def _check_dates(here: str, certificate: x509.Certificate, now: datetime.datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        raise ConfigError(f"{here} expired on {ends:%Y-%m-%d %H:%M:%S} UTC (now it is {now:%Y-%m-%d %H:%M:%S})")
    if now < begins:
        raise ConfigError(
            f"{here} is valid from {begins:%Y-%m-%d %H:%M:%S} UTC only (now it is {now:%Y-%m-%d %H:%M:%S}); "
            "is this machine's clock right?"
        )


def _check_name(here: str, leaf: x509.Certificate, name: str) -> None:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        held = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        held = []
    if name not in held:
        raise ConfigError(
            f"{here} is for {', '.join(held) or 'no DNS name'}, not for {name}: peers will not accept it; "
            "issue one with that DNS subject alternative name"
        )


def _authority(
    leaf: x509.Certificate, intermediates: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> x509.Certificate | None:
    """Find the authority at the end of the chain of signatures from the leaf; None if there is none."""
    current, left = leaf, list(intermediates)
    while True:
        for authority in authorities:
            if _issued(current, authority):
                return authority
        following = next((signer for signer in left if _issued(current, signer)), None)
        if following is None:
            return None
        left.remove(following)
        current = following


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or "an empty subject"
