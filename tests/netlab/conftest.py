"""Where no network namespaces can be made, what needs them is skipped."""

from collections.abc import Iterator

import pytest

from accordion_bench.netlab import hosts
from accordion_bench.options.checks import ConfigError


@pytest.fixture(scope="module")
def allowed() -> Iterator[None]:
    """Skip with the sentence that the user would read; tests under sudo stay root's."""
    try:
        hosts.refuse()
    except ConfigError as refused:
        pytest.skip(str(refused))
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SUDO_UID", raising=False)
        yield
