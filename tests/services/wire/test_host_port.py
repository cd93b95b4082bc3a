import pytest

from services.wire.host_port import join_address, split_address


@pytest.mark.parametrize(
    "host, port, text",
    [
        ("127.0.0.1", 80, "127.0.0.1:80"),
        ("head", 6379, "head:6379"),
        ("::1", 80, "[::1]:80"),
        ("fe80::1%eth0", 7, "[fe80::1%eth0]:7"),
    ],
)
def test_what_is_joined_is_split_again_N28(host, port, text):
    assert join_address(host, port) == text
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("auto", "", ":80", "head:", "head:x", "[::1]", "head:²", "head:65536"),
        *("head:1" + 5_000 * "0", "[]:80", "[::1:80", "::1]:80", "[::1]80:90", "::1:80"),
    ],
)
def test_a_text_that_is_no_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(text)
