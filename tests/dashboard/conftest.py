"""What several tests of the dashboard share."""

import pytest

from services.wire.tls import RunAuthority


@pytest.fixture(scope="session")
def authority():
    return RunAuthority.create("run-a")
