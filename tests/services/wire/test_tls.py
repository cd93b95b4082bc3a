import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from services.wire.tls import SERVER_NAME, RunAuthority


def test_certificate_tolerates_a_clock_that_is_behind_and_names_no_host():
    credentials = RunAuthority.create("r").issue("learner")
    certificate = x509.load_pem_x509_certificate(credentials.cert_pem)
    authority = x509.load_pem_x509_certificate(credentials.ca_pem)
    now = datetime.datetime.now(datetime.UTC)
    for one in (certificate, authority):
        assert one.not_valid_before_utc < now - datetime.timedelta(hours=23)
        assert one.not_valid_after_utc > now + datetime.timedelta(days=300)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    certificate.verify_directly_issued_by(authority)


def test_leaf_cannot_sign_further_certificates():
    credentials = RunAuthority.create("r").issue("rollout-1")
    certificate = x509.load_pem_x509_certificate(credentials.cert_pem)
    extensions = certificate.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_key_is_not_shown_and_long_names_fit():
    credentials = RunAuthority.create("a-very-long-run-name-" * 10).issue("rollout-" + "9" * 99)
    assert b"PRIVATE KEY" in credentials.key_pem
    assert "PRIVATE KEY" not in repr(credentials) and "key_pem" not in repr(credentials)
