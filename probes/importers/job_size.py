"""How large a job is that a table of operations tells of: a flat YAML file beside it may say so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from probes.importers import Unusable
from probes.importers.files import open_plain

_META_LINE = re.compile(r"\s*([A-Za-z_]+)\s*:\s*(-?\d{1,18})\s*(?:#.*)?")


def world_size(paths: Sequence[Path], highest: int) -> int:
    """The job's ranks: as the meta file of a table says, else as many as the highest rank needs.

    Raises :class:`probes.importers.Unusable` for a meta file that tells fewer.
    """
    for path in paths:
        for meta in _metas(path):
            told = _meta(meta).get("world_size")
            if told is not None and told <= highest:
                raise Unusable(
                    f"{meta}: world_size {told}, but {path} has rank {highest}: one of them is wrong", meta
                )
            if told is not None and told < 1 << 31:
                return told
    return highest + 1


def _metas(path: Path) -> list[Path]:
    """Files that may describe this table, the likeliest first: meta-AR.yaml for trace-AR.parquet."""
    stem = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    names = [stem.replace("trace", "meta"), f"{stem}.meta", f"meta-{stem}", "meta"]
    found = [path.with_name(f"{name}{ending}") for name in names for ending in (".yaml", ".yml")]
    return [meta for meta in dict.fromkeys(found) if meta.is_file()]


def _meta(path: Path) -> dict[str, int]:
    """The whole numbers of a flat YAML file (``key: 4``, one a line); what is not that is passed over."""
    with open_plain(path) as stream:
        lines = stream.read(1 << 16).decode("utf-8", "replace").splitlines()
    return {found[1]: int(found[2]) for line in lines if (found := _META_LINE.fullmatch(line))}
