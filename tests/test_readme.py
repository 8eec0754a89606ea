"""What README.md and the other notes tell a reader to run and to open is there."""

from pathlib import Path
import re

import pytest

from scripts.readme_command import README, bash_blocks

ROOT = Path(__file__).parents[1]
NOTES = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "kernels/**/*.md", "models/**/*.md", "scripts/**/*.md", "tests/**/*.md")
    for file in ROOT.glob(pattern)
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown page's headings get."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(file: Path) -> list[str]:
    """Relative links of a Markdown file that lead to no file, or to no heading of one."""
    prose = FENCED.sub("", file.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"""(?:src|href)="([^"]+)\"""", prose)
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def missing_names(text: str) -> list[str]:
    """Modules and files that a text's commands name and that are not there."""
    missing = []
    for module in re.findall(r"python3? -m (forge_mlx(?:\.\w+)*)", text):
        path = ROOT.joinpath(*module.split("."))
        command = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        if not command.is_file() or "__main__" not in command.read_text(encoding="utf-8"):
            missing.append(module)
    for name in re.findall(r"(?<![\w/.])(?:(?:models|scripts|tests|kernels|forge_mlx)/[\w/.-]+\.\w+)", text):
        if not (ROOT / name).is_file():
            missing.append(name)
    return missing


@pytest.fixture(scope="module")
def opening() -> str:
    """README.md up to its first heading below the title."""
    return re.split(r"^## ", README.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]


def test_readme_begins_with_two_commands(opening):
    assert opening.startswith("# ")
    assert [language for language, _ in FENCED.findall(opening)] == ["bash", "bash"]
    before = opening.split("```")[0]
    assert len([line for line in before.splitlines() if line.strip()]) <= 6


def test_each_command_sets_up_for_itself(opening):
    train, test = bash_blocks(opening)
    for block, extras in ((train, "[cpu]"), (test, "[cpu,test]")):
        assert "python3 -m venv .venv" in block
        assert f'pip install -e ".{extras}"' in block
    assert "-m forge_mlx.train models/configs/quickstart.yaml" in train
    assert test.rstrip().endswith("-m pytest -n 2 --dist worksteal")


@pytest.mark.parametrize("note", NOTES)
def test_links_lead_somewhere(note):
    assert broken_links(ROOT / note) == []


@pytest.mark.parametrize("note", NOTES)
def test_commands_name_what_is_there(note):
    assert missing_names((ROOT / note).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("note", NOTES)
def test_examples_import_forge_mlx_before_mlx(note):
    for language, code in FENCED.findall((ROOT / note).read_text(encoding="utf-8")):
        names = re.findall(r"^(?:from|import) (forge_mlx|mlx)\b", code, re.MULTILINE)
        assert language != "python" or "mlx" not in names or names[0] == "forge_mlx"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# One heading\n\n## And `two`, too\n")
    links = [
        "there.md",
        "there.md#one-heading",
        "there.md#and-two-too",
        "#here",
        "https://x.org/y",
        "gone.md",
    ]
    text = "# Here\n" + "".join(f"[x]({link})\n" for link in [*links, "there.md#gone", "#gone"])
    (tmp_path / "note.md").write_text(text + '<img src="gone.png">\n```\n[x](in a block)\n```\n')
    assert broken_links(tmp_path / "note.md") == ["gone.md", "there.md#gone", "#gone", "gone.png"]


def test_missing_names_are_found():
    text = "python -m forge_mlx.train models/configs/quickstart.yaml; -m forge_mlx.info; kernels/gone.py"
    assert missing_names(text) == ["kernels/gone.py"]
    text = "python3 -m forge_mlx.gone models/configs/gone.yaml; python -m forge_mlx.blas"
    assert missing_names(text) == ["forge_mlx.gone", "forge_mlx.blas", "models/configs/gone.yaml"]
