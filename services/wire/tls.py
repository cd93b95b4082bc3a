"""The certificates of one run: its own authority, which is made at the start and ends with the run.

Every process of the run gets a certificate, every connection is mutual TLS, and nothing outside
the run is trusted. Keys live in memory only.
"""

import dataclasses
import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_NAME = "tandem.internal"
"""The one name in every certificate: clients check it whatever address they dialled."""

CLOCK_SKEW = datetime.timedelta(days=1)
LIFETIME = datetime.timedelta(days=365)
"""Longer than any run; the authority dies with the process that made it."""
COMMON_NAME_CHARS = 64
"""Longest common name that X.509 allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """A process's certificate and key, and the authority that it trusts, as PEM."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)


class RunAuthority:
    """Signs the certificates of one run."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate):
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, run_id: str) -> "RunAuthority":
        """Makes a new authority; two of the same run do not trust each other."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"tandem run {run_id}")
        certificate = (
            _builder(subject=name, issuer=name, public_key=key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def issue(self, role: str) -> Credentials:
        """Makes a certificate for one process, valid as client and as server.

        Args:
            role: of the process, such as `learner` or `rollout-3`; becomes its common name.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(
                subject=_name(role),
                issuer=self._certificate.subject,
                public_key=key.public_key(),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Credentials(
            ca_pem=self._certificate.public_bytes(serialization.Encoding.PEM),
            cert_pem=certificate.public_bytes(serialization.Encoding.PEM),
            key_pem=key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:COMMON_NAME_CHARS])])


def _builder(
    *, subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Validity starts in the past, so that a host whose clock is behind accepts it."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
