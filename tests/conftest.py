"""What every test relies on."""

from collections.abc import Callable, Iterator
import os
import signal

# On an NVIDIA GPU MLX rounds float32 products to TF32, 10 bits, unless this is set before it starts.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Processes of pytest-xdist share the cores already: threads of theirs that wait for each other would only cost time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before any test module imports mlx.core: it loads the BLAS.
import forge_mlx  # noqa: F401
import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache folder; a BLAS copy that was loaded already stays.

    The processes of pytest-xdist have one such folder together, so that a kernel is compiled once.
    """
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent / "cache" if is_shared else tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_MLX_CACHE", str(folder))
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
