"""Which files a corpus is made of: paths, folders, globs and the standard library."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
import glob
import gzip
import hashlib
import os
from pathlib import Path
import sysconfig
from typing import BinaryIO, Literal, cast

JSON_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
CORPUS_SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_CHUNK = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
        path: where it is.
        name: how messages call it: the path as the user would write it.
    """

    path: Path
    name: str

    @property
    def is_gzip(self) -> bool:
        """Whether the file is compressed, by its name."""
        return self.path.suffix.lower() == ".gz"

    @property
    def is_json(self) -> bool:
        """Whether each line is one JSON document, by its name."""
        return self.kind in JSON_SUFFIXES

    @property
    def kind(self) -> str:
        """The suffix that tells what the file holds, in lower case and without `.gz`."""
        return _kind(self.path.name)

    def open(self) -> BinaryIO:
        """Open for reading bytes, decompressed.

        Raises:
            ValueError: the file cannot be opened.
        """
        return self._open(gzip.open if self.is_gzip else Path.open)

    def digest(self) -> str:
        """Hash of the file's bytes as they lie on the disk.

        Raises:
            ValueError: the file cannot be read.
        """
        state = hashlib.blake2b(digest_size=16)
        with self._open(Path.open) as raw:
            while chunk := raw.read(_CHUNK):
                state.update(chunk)
        return state.hexdigest()

    def _open(self, opener: Callable[[Path, Literal["rb"]], object]) -> BinaryIO:
        try:
            return cast(BinaryIO, opener(self.path, "rb"))
        except OSError as error:
            raise ValueError(
                f"[data] a source file must be readable but got {self.name}: {error.strerror}. "
                "Correct its permissions or take it out of the source."
            ) from error


@dataclass
class Listing:
    """The files of a source in their fixed order, and what a folder held beside them.

    Attributes:
        files: each file once, in the order of the source's entries; by path within a folder or a glob.
        left_out: how many files were not taken, by reason.
    """

    files: list[SourceFile] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, path: Path, name: str, seen: set[str]) -> None:
        """Add a file unless the same file is listed already."""
        real = os.path.realpath(path)
        if real in seen:
            self.left_out["named twice"] += 1
            return
        seen.add(real)
        self.files.append(SourceFile(path, name))

    def describe_left_out(self) -> str:
        """` (2 .png, 1 hidden)`: the counts in words, or nothing."""
        parts = [f"{count} {reason}" for reason, count in self.left_out.most_common() if count]
        return f" ({', '.join(parts)})" if parts else ""


def list_stdlib(root: Path | None = None) -> Listing:
    """Every `*.py` of the standard library, sorted by relative path, without installed packages.

    Args:
        root: the library's folder; None for that of the running Python.

    Raises:
        ValueError: this Python has no library sources on disk.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    listing, seen = Listing(), set[str]()
    for path in _walk(root, lambda name: name in _NOT_STDLIB):
        if path.suffix == ".py":
            if path.is_file():
                listing.add(path, path.relative_to(root).as_posix(), seen)
            else:
                listing.left_out["broken link"] += 1
    if not listing.files:
        raise ValueError(
            f"[data] source: stdlib needs the standard library's .py files but got none in {root}. "
            "Give text files or folders as the source."
        )
    return listing


def list_paths(entries: list[str], suffixes: tuple[str, ...] = CORPUS_SUFFIXES) -> Listing:
    """The files that paths, folders and globs stand for.

    A file and a glob's matches are taken whatever their suffix. A folder gives, at any depth, its files
    with one of the suffixes, plain or with `.gz` behind it, without hidden ones. Linked folders are followed, each
    real folder once.

    Args:
        entries: as the user wrote them.
        suffixes: of the files to take from folders, in lower case.

    Raises:
        ValueError: an entry does not exist, is no regular file, or stands for no file.
    """
    listing, seen = Listing(), set[str]()
    for entry in entries:
        path = Path(entry).expanduser()
        if path.is_dir():
            _add_folder(listing, path, entry, seen, suffixes)
        elif path.is_file():
            listing.add(path, entry, seen)
        elif path.exists():
            raise ValueError(f"[data] a source must be a regular file or a folder but got {entry!r}.")
        elif glob.has_magic(entry):
            _add_glob(listing, str(path), entry, seen)
        else:
            reason = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
            raise ValueError(
                f"[data] every source must exist but {entry!r} {reason} (relative to {Path.cwd()}). Correct the path."
            )
    return listing


def _kind(name: str) -> str:
    """The suffix that tells what the file holds, without `.gz`."""
    return Path(name.lower().removesuffix(".gz")).suffix


def _walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """All files below `root` sorted by relative path; a link back to a folder above does not loop."""
    found: list[Path] = []
    visited = {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise_unreadable):
        kept = []
        for name in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, name))
            if not skip(name) and real not in visited:
                visited.add(real)
                kept.append(name)
        subfolders[:] = kept
        found.extend(Path(folder, name) for name in names)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _raise_unreadable(error: OSError) -> None:
    raise ValueError(f"[data] a source folder must be readable but got {error.filename}: {error.strerror}.") from error


def _add_folder(listing: Listing, root: Path, entry: str, seen: set[str], suffixes: tuple[str, ...]) -> None:
    taken: list[Path] = []
    rest = Listing()
    for path in _walk(root, lambda name: name.startswith(".")):
        kind = _kind(path.name)
        if path.name.startswith("."):
            rest.left_out["hidden"] += 1
        elif kind not in suffixes:
            rest.left_out[kind or "no suffix"] += 1
        elif not path.is_file():
            rest.left_out["broken link" if path.is_symlink() else "no regular file"] += 1
        else:
            taken.append(path)
    if not taken:
        raise ValueError(
            f"[data] a source folder must hold a file with one of the suffixes {' '.join(suffixes)} (or those with "
            f".gz) but {entry!r} holds none{rest.describe_left_out()}. "
            f"Name other files by a glob: {entry}/**/*.ext"
        )
    listing.left_out += rest.left_out
    for path in taken:
        listing.add(path, str(path), seen)


def _add_glob(listing: Listing, pattern: str, entry: str, seen: set[str]) -> None:
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [match for match in matches if os.path.isfile(match)]
    if not files:
        found = f"{len(matches)} folders and no file" if matches else "nothing"
        raise ValueError(
            f"[data] a glob must match at least one file but {entry!r} matches {found} "
            f"(relative to {Path.cwd()}). Correct the pattern or name a folder."
        )
    listing.left_out["not a file"] += len(matches) - len(files)
    for match in files:
        listing.add(Path(match), match, seen)
