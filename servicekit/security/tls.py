"""Mutual TLS of a process: gRPC credentials from its certificate, which is read again when its files change."""

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import grpc

from servicekit.errors import ConfigError, PermissionDenied
from servicekit.logs import get_logger
from servicekit.metrics import TLS_EXPIRY
from servicekit.security.certificates import CA, CERT, KEY, Material, TlsFiles, read_material, role_name

# Roles whose calls a server admits by default: the coordinator, and people with their tools.
OPERATOR = "operator"
CALLERS = ("coordinator", OPERATOR)
# A check of three files takes 10 us; certificates change every few weeks.
_LOOK_EVERY_S = 1.0

log = get_logger(__name__)


class Identity:
    """The identity of this process towards its peers. Thread-safe.

    Replaced files are used from the next handshake on; if they are invalid, that is logged once, and the old ones stay
    in use.

    Args:
        role: role whose name the certificate must have.
        clock: monotonic seconds.
        now: returns the date.
    Raises: ConfigError: the files are invalid.
    """

    def __init__(
        self,
        files: TlsFiles,
        role: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._files = files
        self._role = role
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._looked_s = clock()
        self._stamp = _stamp(files)
        self._material = read_material(files, role, now())
        self._expiry_logged = False
        TLS_EXPIRY.set_function(lambda: self.material().expires.timestamp())

    def material(self, *, at_once: bool = False) -> Material:
        """Return the newest valid files, checked within the last second, or now with `at_once`."""
        with self._lock:
            if at_once or self._clock() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = self._clock()
                self._look()
            return self._material

    def _look(self) -> None:
        stamp = _stamp(self._files)
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            self._read_again()
        if self._now() > self._material.expires and not self._expiry_logged:
            self._expiry_logged = True
            log.error(
                "certificate expired, peers refuse it",
                file=f"{CERT}={self._files.certificate}",
                subject=self._material.subject,
                expired=self._material.expires.isoformat(),
            )

    def _read_again(self) -> None:
        try:
            found = read_material(self._files, self._role, self._now())
        except ConfigError as error:
            log.error("new certificate refused, the old one stays in use", error=str(error))
            return
        if found.fingerprint != self._material.fingerprint:
            self._material, self._expiry_logged = found, False
            log.info("certificate changed", subject=found.subject, expires=found.expires.isoformat())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make credentials that require a certificate of every client; each handshake uses the newest files."""
        configured = self.material()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal configured
            # Handshakes are rare, and a peer that has renewed its own certificate makes no second one soon.
            newest = self.material(at_once=True)
            if newest is configured:
                return None
            configured = newest
            return _server_configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(configured), changed, require_client_authentication=True
        )


def operator_identity(environ: Mapping[str, str] = os.environ) -> Identity | None:
    """Return the identity of a person's command towards the services; None: no TLS. Raises: ConfigError."""
    files = TlsFiles.of(*(environ.get(name, "") for name in (CERT, KEY, CA)))
    if files is None:
        return None
    try:
        return Identity(files, OPERATOR)
    except ConfigError:
        with contextlib.suppress(ConfigError):  # in the coordinator's own container
            return Identity(files, "coordinator")
        raise


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Make the credentials of a channel with this process's certificate."""
    return grpc.ssl_channel_credentials(material.authorities, material.key, material.chain)


def name_option(role: str) -> tuple[str, str]:
    """Make the channel option that requires the name of `role` in the peer's certificate, whatever its address."""
    return ("grpc.ssl_target_name_override", role_name(role))


def check_caller(method: str, names: list[str], callers: Sequence[str] = CALLERS) -> None:
    """Check a caller by the names in its certificate. Raises: PermissionDenied: none is of a role in `callers`."""
    admitted = [role_name(role) for role in callers]
    if not set(names) & set(admitted):
        raise PermissionDenied(
            f"call of {method} by {', '.join(names) or 'a certificate without DNS names'}; "
            f"certificates for {' or '.join(admitted)} are admitted"
        )


def _server_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.authorities)


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...] | None:
    try:
        return files.stamp()
    except OSError:  # reading says which; while files are swapped, the next look finds them
        return None
