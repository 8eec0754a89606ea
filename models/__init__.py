"""The model zoo, one file per architecture: ``from forge_mlx.models.gpt import GPT``."""

from typing import TYPE_CHECKING, NoReturn

if __name__ == "models" and not TYPE_CHECKING:
    # As in kernels: a library that looks for a package of this name must get no error.
    del __path__

    def __getattr__(name: str) -> NoReturn:
        # `from models import x` and `import models.x` both begin with the path.
        error = ImportError if name == "__path__" else AttributeError
        raise error("import forge_mlx.models, not models: this folder is a part of the package forge_mlx")
