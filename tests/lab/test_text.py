from pathlib import Path

import pytest

from tests.api import read_folder, read_standard_library


def test_the_standard_library_is_the_same_text_every_time() -> None:
    first, second = read_standard_library(), read_standard_library()
    assert first.digest == second.digest
    assert b"import" in first.train
    assert first.files > 100
    whole = len(first.train) + len(first.validation) + len(first.held_out)
    assert 0.04 < len(first.held_out) / whole < 0.06
    assert len(first.validation) == len(first.held_out)


def test_a_folder_gives_its_text_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("wort " * 4000, encoding="utf-8")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("größe " * 2000, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe " * 5000)
    (tmp_path / "image.bin").write_bytes(b"\0" * 50_000)
    (tmp_path / ".hidden").write_text("secret " * 5000, encoding="utf-8")
    corpus = read_folder(tmp_path)
    whole = corpus.train + corpus.validation + corpus.held_out
    assert corpus.files == 2
    assert sorted(whole.decode().split()) == ["größe"] * 2000 + ["wort"] * 4000


def test_the_held_out_part_follows_from_the_names_alone(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for name in "abcdefgh":
            (tmp_path / place / name).write_text(name * 4000, encoding="utf-8")
    assert read_folder(tmp_path / "one").held_out == read_folder(tmp_path / "two").held_out


def test_too_little_text_is_an_error_with_the_figures(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds 5 bytes of text in 1 files; at least 20000 bytes"):
        read_folder(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(path)
