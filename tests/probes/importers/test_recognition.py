"""What a file is, its content says; a folder is one job, and what is no trace in it is named."""

import gzip
import json
import pickle

import pytest

from probes.importers import Unusable, gather, recognise

KINETO = json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}).encode()
DUMP = pickle.dumps({"version": "2.9", "pg_config": {}, "entries": []}, protocol=2)
INSPECTOR = json.dumps({"header": {"id": "0x1", "rank": 0, "n_ranks": 2}, "coll_perf": {"coll": "AllReduce"}})
TABLE = b"rank,step,optype,start_ts,duration\n0,1,forward-compute,0.0,0.1\n"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (KINETO, "kineto"),
        (b"\xef\xbb\xbf  " + KINETO, "kineto"),
        (gzip.compress(KINETO), "kineto"),
        (gzip.compress(KINETO * 100)[:-20], "kineto"),
        (b'[{"ph": "X", "ts": 1, "dur": 2, "name": "a"}]', "kineto"),
        (DUMP, "flight-recorder"),
        (json.dumps({"pg_config": {}, "entries": []}).encode(), "flight-recorder"),
        (f"{INSPECTOR}\n{INSPECTOR}\n".encode(), "inspector"),
        (TABLE, "operations"),
        (TABLE.replace(b",", b";"), "operations"),
        (b"PAR1 and the rest", "operations"),
        (b"", None),
        (b"just words", None),
        (b'{"a": 1}', None),
        (pickle.dumps({"a": 1}), None),
        (b"\0\1\2", None),
        (gzip.compress(b""), None),
        (b"\x1f\x8b damaged from the start", None),
    ],
)
def test_a_file_is_what_its_content_says(tmp_path, content, kind):
    path = tmp_path / "trace.parquet"  # whatever its name says
    path.write_bytes(content)
    assert recognise(path) == kind


def test_a_folder_stands_for_all_files_below_it_without_hidden_ones(tmp_path):
    for name in ("b", "deep/er/a", ".hidden", ".git/trace"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(KINETO)
    (tmp_path / "README").write_text("words")
    found = gather([tmp_path, tmp_path / "b"])
    assert (found.kind, found.files) == ("kineto", [tmp_path / "b", tmp_path / "deep/er/a"])
    assert found.left_out == [f"{tmp_path / 'README'}: text of an unknown kind"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (gzip.compress(b""), "a gzip file with nothing in it"),
        (pickle.dumps({"a": 1}), "a pickle without the keys of a Flight Recorder dump"),
        (b'{"a": 1}', "JSON without the keys of a trace"),
        (b"\0\1", "binary data"),
        (b"words", "text of an unknown kind"),
    ],
)
def test_a_file_that_was_named_and_is_no_trace_is_refused_with_what_it_is(tmp_path, content, words):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(Unusable) as caught:
        gather([path])
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "sysom reads Kineto traces" in str(caught.value)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Unusable, match="nowhere cannot be read: No such file"):
        gather([tmp_path / "nowhere"])


def test_a_folder_without_a_trace_says_what_is_in_it(tmp_path):
    (tmp_path / "a").write_text("words")
    with pytest.raises(Unusable, match=r"no trace among .* \(.*a: text of an unknown kind\)"):
        gather([tmp_path])


def test_several_kinds_at_once_are_refused_with_a_file_of_each(tmp_path):
    (tmp_path / "trace").write_bytes(KINETO)
    (tmp_path / "dump").write_bytes(DUMP)
    with pytest.raises(Unusable, match=r"flight-recorder: .*dump; kineto: .*trace\): import each kind as"):
        gather([tmp_path])
