"""A gzipped file is read as what is in it, and a broken one says where it breaks."""

import gzip

import pytest

from probes.importers import Unusable
from probes.importers.files import open_plain

TEXT = b"".join(b"%d words that do not repeat too much\n" % number for number in range(50_000))


def read(path):
    with open_plain(path) as file:
        return file.read()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_bytes_come_out_plain(tmp_path, pack):
    path = tmp_path / "file"
    path.write_bytes(pack(TEXT))
    assert read(path) == TEXT


def test_a_gzip_file_that_is_cut_short_says_after_how_much(tmp_path):
    path = tmp_path / "file"
    whole = gzip.compress(TEXT)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unusable, match=r"file: the gzip file is cut short after \d{6} bytes") as caught:
        read(path)
    assert caught.value.path == path


def test_a_gzip_file_that_is_damaged_says_after_how_much(tmp_path):
    path = tmp_path / "file"
    damaged = bytearray(gzip.compress(TEXT))
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(Unusable, match=r"file: the gzip file is damaged after \d+ bytes"):
        read(path)


def test_a_file_that_is_not_there_or_a_folder_is_said(tmp_path):
    with pytest.raises(Unusable, match="nowhere cannot be read: No such file"):
        read(tmp_path / "nowhere")
    with pytest.raises(Unusable, match="cannot be read: Is a directory"):
        read(tmp_path)
