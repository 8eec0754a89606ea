"""The model zoo, one file per architecture: ``from forge_mlx.models.gpt import GPT``."""

if __name__ == "models":
    raise ImportError("import forge_mlx.models, not models: this folder is a part of the package forge_mlx")
