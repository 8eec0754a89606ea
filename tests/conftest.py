"""What every test relies on."""

from collections.abc import Iterator

import pytest

# First, so that no test module imports mlx.core before the BLAS is loaded.
import forge_mlx  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache folder; a BLAS copy that was loaded already stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_MLX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
