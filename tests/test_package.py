"""What is installed: every package, and every file that they read."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


FOLDERS = ("bot", "bpf", "diagnosis", "probes", "templates")


def files(pattern):
    return [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_every_package_is_installed():
    assert sorted(SETUP["packages"]) == sorted(".".join(path.parent.parts) for path in files("__init__.py"))


def test_every_file_that_is_no_code_is_installed_with_its_package():
    for path in files("*"):
        if path.suffix == ".py":
            continue
        kept = [
            pattern
            for package, patterns in SETUP["package-data"].items()
            for pattern in patterns
            if path.is_relative_to(folder := Path(*package.split(".")))
            and fnmatch.fnmatch(str(path.relative_to(folder)), pattern.replace("**/", "*"))
        ]
        assert kept, f"{path} would not be installed"
