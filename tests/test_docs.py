"""The documents tell the truth: what they list is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from bot.cli import main
from bot.settings import Settings
from diagnosis.causes import TITLES

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_setting_is_documented_and_no_other() -> None:
    listed = set(re.findall(r"^\| `SYSOM_(\w+)`", page("docs/operations.md"), re.MULTILINE))
    assert listed == {name.upper() for name in Settings.__struct_fields__}


def test_every_command_is_documented_and_says_how_to_use_it() -> None:
    listed = set(re.findall(r"^\| `sysom (\w+)", page("docs/operations.md"), re.MULTILINE))
    assert listed == set(main.commands)
    for command in main.commands.values():
        assert "Example: " in (command.help or ""), command.name


def test_every_cause_is_documented() -> None:
    listed = set(re.findall(r"^\| `([\w-]+)`", page("docs/causes.md"), re.MULTILINE))
    assert listed == set(TITLES)


def test_every_kind_of_event_is_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "probes").rglob("*.py"))
    used = set(re.findall(r'(?:_event\(\s*|\(\s*)"([a-z]+-[a-z]+)",', sources))
    used |= set(re.findall(r'\bkind="([a-z-]+)"', sources))
    listed = page("docs/architecture.md").partition("**Events**")[2].partition("\n\n")[0]
    assert used
    assert used == set(re.findall(r"`([a-z-]+)`", listed))


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
