import os
from pathlib import Path

from forge_mlx.data.files import list_paths, list_stdlib
import pytest


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "docs/b.txt",
        "docs/a.md",
        "docs/sub/c.jsonl.gz",
        "docs/x.png",
        "docs/.hidden.txt",
        "docs/.git/y.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def names(listing):
    return [file.name for file in listing.files]


@pytest.mark.usefixtures("tree")
def test_folder_is_sorted_and_counts_what_it_leaves_out():
    listing = list_paths(["docs"])
    assert names(listing) == ["docs/a.md", "docs/b.txt", "docs/sub/c.jsonl.gz"]
    assert listing.left_out == {".png": 1, "hidden": 1}
    assert listing.files[2].is_gzip
    assert listing.files[2].is_json
    assert not listing.files[0].is_json


@pytest.mark.usefixtures("tree")
def test_glob_and_file_take_any_suffix():
    assert names(list_paths(["docs/*.png", "docs/b.txt"])) == ["docs/x.png", "docs/b.txt"]
    assert names(list_paths(["docs/**/*.gz"])) == ["docs/sub/c.jsonl.gz"]


@pytest.mark.usefixtures("tree")
def test_folder_that_a_glob_matches_is_counted():
    listing = list_paths(["docs/*"])
    assert names(listing) == ["docs/a.md", "docs/b.txt", "docs/x.png"]
    assert listing.left_out == {"not a file": 1}
    assert listing.describe_left_out() == " (1 not a file)"


@pytest.mark.usefixtures("tree")
def test_a_file_with_magic_characters_in_its_name_is_a_file():
    Path("a[1].txt").write_text("x")
    assert names(list_paths(["a[1].txt"])) == ["a[1].txt"]


@pytest.mark.usefixtures("tree")
def test_file_named_twice_is_read_once_and_counted():
    listing = list_paths(["docs/b.txt", "docs"])
    assert names(listing) == ["docs/b.txt", "docs/a.md", "docs/sub/c.jsonl.gz"]
    assert listing.left_out["named twice"] == 1


def test_linked_folder_is_followed_and_a_loop_ends(tree):
    (tree / "other").mkdir()
    (tree / "other" / "d.txt").write_text("x")
    os.symlink(tree / "docs", tree / "docs" / "sub" / "loop")
    os.symlink(tree / "other", tree / "docs" / "linked")
    os.symlink(tree / "nowhere", tree / "docs" / "broken.txt")
    listing = list_paths(["docs"])
    assert names(listing) == ["docs/a.md", "docs/b.txt", "docs/linked/d.txt", "docs/sub/c.jsonl.gz"]
    assert listing.left_out["broken link"] == 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nope.txt", r"every source must exist but 'nope.txt' does not exist"),
        ("circle.txt", r"'circle.txt' is a link that leads nowhere"),
        ("no*.txt", r"must match at least one file but 'no\*.txt' matches nothing"),
        ("fold*", r"matches 1 folders and no file"),
        ("folder", r"a source folder must hold a file .* but 'folder' holds none \(1 .png\)"),
        ("pipe", r"must be a regular file or a folder but got 'pipe'"),
    ],
)
def test_entries_that_stand_for_no_file(tree, entry, message):
    os.symlink("circle.txt", tree / "circle.txt")
    os.mkfifo(tree / "pipe")
    (tree / "folder").mkdir()
    (tree / "folder" / "z.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        list_paths([entry])


def test_what_another_folder_left_out_is_not_blamed_on_an_empty_one(tree):
    (tree / "folder").mkdir()
    (tree / "folder" / "z.pdf").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"'folder' holds none \(1 .pdf\)"):
        list_paths(["docs", "folder"])


@pytest.mark.usefixtures("tree")
def test_unreadable_file_and_folder(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", "docs")

    (file,) = list_paths(["docs/b.txt"]).files
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"must be readable but got docs/b.txt: Permission denied"):
        file.open()
    with pytest.raises(ValueError, match=r"must be readable but got docs/b.txt: Permission denied"):
        file.digest()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"source folder must be readable but got docs: Permission denied"):
        list_paths(["docs"])


def test_stdlib_has_no_installed_packages(tmp_path):
    for name in (
        "b.py",
        "a/z.py",
        "a-b.py",
        "site-packages/p.py",
        "a/__pycache__/q.py",
        "a/dist-packages/r.py",
        "n.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert names(list_stdlib(tmp_path)) == ["a-b.py", "a/z.py", "b.py"]


def test_stdlib_of_this_python():
    listed = names(list_stdlib())
    assert {"argparse.py", "json/decoder.py"} <= set(listed)
    assert listed == sorted(listed)
    assert not [name for name in listed if "-packages" in name or "__pycache__" in name]


def test_stdlib_without_sources(tmp_path):
    with pytest.raises(ValueError, match=r"needs the standard library's .py files but got none"):
        list_stdlib(tmp_path)
