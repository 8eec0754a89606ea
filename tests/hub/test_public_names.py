"""What `forge_mlx.hub` itself offers."""

from forge_mlx import hub
from forge_mlx.hub import pretrained
import pytest


def test_public_names_are_those_of_pretrained():
    for name in hub.__all__:
        assert getattr(hub, name) is getattr(pretrained, name)


def test_any_other_name_is_an_error():
    with pytest.raises(AttributeError, match=r"^module 'forge_mlx\.hub' has no attribute 'load_pickle'$"):
        _ = hub.load_pickle
