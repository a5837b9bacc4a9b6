"""Names of the kernel's functions, from /proc/kallsyms as this and other machines have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.host.kernel_symbols import KernelSymbols, SymbolsHidden

KALLSYMS = """\
ffffffff81000000 T _stext
ffffffff81200040 t io_schedule
ffffffff81200000 T schedule
ffffffff81300000 D not_a_function
ffffffff81400000 t ext4_fsync_nojournal.constprop.0
ffffffff81500000 t shrink_folio_list.isra.0.cold
ffffffffc0000000 t nfs_file_read\t[nfs]
"""


def proc(folder: Path, kallsyms: str = KALLSYMS, modules: str | None = None) -> Path:
    (folder / "kallsyms").write_text(kallsyms)
    if modules is not None:
        (folder / "modules").write_text(modules)
    return folder


def test_an_address_lies_in_the_function_that_begins_before_it(tmp_path: Path) -> None:
    symbols = KernelSymbols(proc(tmp_path))
    assert symbols.names([0xFFFFFFFF81200000, 0xFFFFFFFF8120003F, 0xFFFFFFFF81200040]) == [
        "schedule",
        "schedule",
        "io_schedule",
    ]
    assert symbols.names([0xFFFFFFFF80000000]) == [""], "below all"


def test_what_compilers_append_is_left_out(tmp_path: Path) -> None:
    symbols = KernelSymbols(proc(tmp_path))
    assert symbols.names([0xFFFFFFFF81400010, 0xFFFFFFFF81500010, 0xFFFFFFFFC0000008]) == [
        "ext4_fsync_nojournal",
        "shrink_folio_list",
        "nfs_file_read",
    ]


def test_a_module_that_was_loaded_since_is_found(tmp_path: Path) -> None:
    folder = proc(tmp_path, modules="nfs 100 1 - Live 0xffffffffc0000000\n")
    symbols = KernelSymbols(folder)
    assert symbols.names([0xFFFFFFFFC1000000]) == ["nfs_file_read"], "the nearest that is known"
    proc(
        folder,
        KALLSYMS + "ffffffffc0ff0000 t fuse_flush\t[fuse]\n",
        "fuse 9 1 - Live 0xffffffffc0ff0000\nnfs 100 7 - Live 0xffffffffc0000000\n",
    )
    assert symbols.names([0xFFFFFFFFC1000000]) == ["fuse_flush"]


def test_a_module_that_is_used_once_more_is_no_reason_to_read_again(tmp_path: Path) -> None:
    folder = proc(tmp_path, modules="nfs 100 1 - Live 0xffffffffc0000000\n")
    symbols = KernelSymbols(folder)
    symbols.names([1])
    (folder / "kallsyms").unlink()
    proc(folder, "", "nfs 100 2 a,b Live 0xffffffffc0000000\n")
    assert symbols.names([0xFFFFFFFF81200000]) == ["schedule"]


@pytest.mark.parametrize(
    "kallsyms", ["0000000000000000 T schedule\n0000000000000000 t io_schedule\n", ""], ids=["zeros", "empty"]
)
def test_hidden_addresses_are_told_with_what_to_do(tmp_path: Path, kallsyms: str) -> None:
    symbols = KernelSymbols(proc(tmp_path, kallsyms))
    assert "kernel.kptr_restrict" in symbols.why_none()
    with pytest.raises(SymbolsHidden, match=r"kernel\.kptr_restrict"):
        symbols.names([1])


def test_a_kernel_without_names_is_told(tmp_path: Path) -> None:
    assert "CONFIG_KALLSYMS" in KernelSymbols(tmp_path).why_none()
    with pytest.raises(SymbolsHidden, match="CONFIG_KALLSYMS"):
        KernelSymbols(tmp_path).names([1])


def test_a_first_symbol_at_address_0_does_not_hide_the_others(tmp_path: Path) -> None:
    symbols = KernelSymbols(proc(tmp_path, "0000000000000000 A fixed_percpu_data\n" + KALLSYMS))
    assert symbols.why_none() == ""
