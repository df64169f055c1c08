from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from tests.support.wheel import build, build_wheel, copied_source

ROOT = Path(__file__).parents[3]


def test_wheel_packages_match_source_folders():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "skyrl_train").glob("**/__init__.py")}
    assert settings["packages"] == sorted(folders | {"skyrl_train.presets"})
    assert not (ROOT / "skyrl_train" / "presets").exists(), "it would hide config/ in a checkout"


def test_installed_wheel_finds_its_presets_outside_the_checkout(tmp_path: Path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(target)
    presets = {f"skyrl_train/presets/{path.name}" for path in (ROOT / "config").glob("*.yaml")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "skyrl_train").rglob("*.py")}
    page = {f"skyrl_train/report/page/page.{kind}" for kind in ("js", "css")}
    assert presets | modules | page <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"skyrl_train"}

    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target), "CUDA_VISIBLE_DEVICES": ""}
    where = "import skyrl_train.config.hydra as h; print(h.presets_folder())"
    for name in sorted(Path(preset).stem for preset in presets):
        check = ["-m", "skyrl_train.entrypoints.check_config", "--elsewhere", "--config-name", name]
        for arguments in (["-c", where], check):
            done = subprocess.run(
                [sys.executable, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() in (str(target / "skyrl_train" / "presets"), "config ok")
    assert list(elsewhere.iterdir()) == []


def test_sdist_contains_viewer_and_builds_wheel(tmp_path: Path):
    done = build("sdist", copied_source(tmp_path / "source"), tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("skyrl_train-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "viewer").exists()
    done = build("wheel", unpacked, tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("skyrl_train-*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        assert "skyrl_train/report/page/page.js" in archive_of_wheel.namelist()


def test_only_distributions_require_viewer_page(tmp_path: Path):
    source = copied_source(tmp_path / "source", with_page=False)
    says = "the page of `skyrl-train report` is not built: install Node.js 18 or later and run scripts/viewer"
    done = build("editable", source, tmp_path)
    assert done.returncode == 0, done.stderr
    done = build("wheel", source, tmp_path)
    assert done.returncode == 0 and f"warning: {says}" in done.stderr
    for kind, environment in (("wheel", {"SKYRL_NEEDS_PAGE": "1"}), ("sdist", {})):
        done = build(kind, source, tmp_path, **environment)
        assert done.returncode != 0 and says in done.stderr


def test_an_installation_installs_no_npm(tmp_path: Path):
    """Without npm on PATH the build runs nothing in viewer/, even as a user who may install packages."""
    source = copied_source(tmp_path / "source", with_page=False)
    (source / "viewer").mkdir()
    (source / "scripts").mkdir()
    (source / "scripts" / "viewer").write_text(': > "$RAN"\n')  # bash alone can do it
    (tmp_path / "bin").mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bin" / "bash").symlink_to(bash)
    done = build("wheel", source, tmp_path, PATH=str(tmp_path / "bin"), RAN=str(tmp_path / "ran"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
