"""``vllm-fl new-vendor`` on a sample of a few lines; tests/installed has the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_fl.cli import main
from vllm_fl.cli.new_vendor import rename
from vllm_fl.cli.output import Problem
from vllm_fl.dispatch.wheels import known_wheels

FILES = {
    "pyproject.toml": 'name = "vllm-plugin-template"\n# <sample>\nauthors = 1\n\n# </sample>\nlast = 1\n',
    ".github/workflows/release.yml": "run: vllm-fl conformance --backend template\n",
    "src/vllm_fl_template/__init__.py": "",
    "src/vllm_fl_template/template.py": "class TemplateBackend: ...\nTEMPLATE = 'template'\n",
    "tests/test_template.py": "import vllm_fl_template\n",
    "changelog.d/+template.added.md": "The sample.\n",
    "rename.py": "from vllm_fl.cli.new_vendor import rename\n",
}
DERIVED = {"src/vllm_fl_template/__pycache__/x.pyc": b"\xff", "dist/x.whl": b"\xff", ".some_cache/x": b"\xff"}
ACME = {
    "pyproject.toml": 'name = "vllm-plugin-acme"\nlast = 1\n',
    ".github/workflows/release.yml": "run: vllm-fl conformance --backend acme\n",
    "src/vllm_fl_acme/__init__.py": "",
    "src/vllm_fl_acme/acme.py": "class AcmeBackend: ...\nACME = 'acme'\n",
    "tests/test_acme.py": "import vllm_fl_acme\n",
}


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources of a sample, as in a clone: its package is on the path."""
    project = tmp_path / "packages" / "vllm-plugin-template"
    fill(project)
    # The real one may be imported.
    monkeypatch.delitem(sys.modules, "vllm_fl_template", raising=False)
    monkeypatch.syspath_prepend(str(project / "src"))
    return project


def fill(folder: Path) -> None:
    for name, content in (FILES | DERIVED).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


def names(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_the_command_and_the_copy_give_the_same(sample: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert main(["new-vendor", "acme", str(made)]) == 0
    assert files(made) == ACME
    copy = tmp_path / "vllm-plugin-acme"
    fill(copy)
    (copy / ".git").mkdir()
    (copy / ".git" / "config").write_text("template")
    rename(copy, "acme")
    assert files(copy) == ACME | {".git/config": "template"}
    assert not (copy / "dist").exists()
    assert names(sample) >= {Path(name) for name in FILES | DERIVED}


def test_a_name_of_two_words(sample: Path, tmp_path: Path) -> None:
    assert main(["new-vendor", "acme_x2", str(tmp_path / "made")]) == 0
    made = files(tmp_path / "made")
    assert made["pyproject.toml"] == 'name = "vllm-plugin-acme-x2"\nlast = 1\n'
    assert made["src/vllm_fl_acme_x2/acme_x2.py"] == "class AcmeX2Backend: ...\nACME_X2 = 'acme_x2'\n"


RESERVED = {name for wheel in known_wheels() for name in (wheel.plugin, wheel.vendor) if name}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "reserved to vllm-") for name in sorted(RESERVED)),
        *((name, "has a meaning of its own") for name in ("native", "flagos", "vendor", "default", "impl")),
        *((name, "has a meaning of its own") for name in ("test", "core", "register_ops")),
        ("my_template", "'template' is the word that is replaced"),
        ("class", "a keyword of Python"),
        *(
            (name, "use lower-case letters")
            for name in ("Acme", "ac-me", "2acme", "_acme", "", "äcme", "a/b")
        ),
    ],
)
def test_a_bad_name(
    sample: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert main(["new-vendor", name, str(tmp_path / "made")]) == 1
    assert reason in capfd.readouterr().err
    assert not (tmp_path / "made").exists()
    copy = tmp_path / "copy"
    fill(copy)
    with pytest.raises(Problem, match=reason):
        rename(copy, name)
    assert names(copy) == names(sample)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("vllm_fl_acme/__init__.py", "a module vllm_fl_acme is already installed"),
        ("vllm_plugin_acme-3.0.dist-info/METADATA", "vllm-plugin-acme 3.0 is already installed"),
        ("other-1.0.dist-info/entry_points.txt", "a plugin 'acme' is already installed, by other"),
    ],
)
def test_a_name_that_is_taken(
    sample: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    made: str,
    reason: str,
) -> None:
    path = tmp_path / "site" / made
    path.parent.mkdir(parents=True)
    path.write_text("")
    if path.parent.suffix == ".dist-info":
        name, _, version = path.parent.stem.partition("-")
        path.with_name("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if path.name == "entry_points.txt":
        path.write_text("[vllm_fl.plugin]\nacme = other\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["new-vendor", "acme", str(tmp_path / "made")]) == 1
    assert reason in capfd.readouterr().err


def test_a_target_that_is_in_use(sample: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    made.mkdir()
    assert main(["new-vendor", "acme", str(made)]) == 0
    assert main(["new-vendor", "acme", str(made)]) == 1
    assert f"{made} is not empty" in capfd.readouterr().err
    assert main(["new-vendor", "acme", str(made / "pyproject.toml")]) == 1
    assert "is no folder" in capfd.readouterr().err
    assert files(made) == ACME


def test_without_the_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm_fl_template", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert main(["new-vendor", "acme", str(tmp_path / "made")]) == 1
    assert "pip install vllm-plugin-template" in capfd.readouterr().err


def test_the_sample_itself_is_not_renamed(sample: Path, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"the sample itself: copy it first, to vllm-plugin-acme"):
        rename(sample, "acme")
    with pytest.raises(Problem, match=r"no copy of vllm-plugin-template"):
        rename(tmp_path / "packages", "acme")
    assert names(sample) >= {Path(name) for name in FILES}
