"""What every test relies on."""

from collections.abc import Callable, Iterator
import os
import signal

# On an NVIDIA GPU MLX rounds float32 products to TF32, 10 bits, unless this is set before it starts.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Before any test module imports mlx.core: it loads the BLAS.
import forge_mlx  # noqa: F401
import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache folder; a BLAS copy that was loaded already stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_MLX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def signals_act() -> None:
    """Started by nohup or in the background of a script, the tests' own processes would inherit ignored signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def call_main(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls a command's `main` with arguments: its exit status and what it wrote to the two streams."""

    def call(main: Callable[[list[str]], int], *arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
