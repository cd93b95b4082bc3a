import pytest

from services.wire.reachable import is_any, is_loopback, own_address
from tests.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    "host, loopback, every",
    [
        ("127.0.0.1", True, False),
        ("127.9.9.9", True, False),
        ("localhost", True, False),
        ("::1", True, False),
        ("0:0:0:0:0:0:0:1", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("0:0::0", False, True),
        ("10.0.0.1", False, False),
        ("127.example", False, False),
        ("host", False, False),
    ],
)
def test_an_address_means_the_same_however_it_is_spelled(host, loopback, every):
    assert (is_loopback(host), is_any(host)) == (loopback, every)


def test_the_own_address_towards_a_host():
    assert own_address("127.0.0.1") == "127.0.0.1"


@needs_ipv6
def test_the_own_address_towards_a_host_of_ipv6():
    assert own_address("::1") == "::1"
