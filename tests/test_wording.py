from tests.api import near, shown


def test_letters_missing_added_or_swapped_count_one() -> None:
    words = ["sparsity", "sparse", "step", "value_bits", "dense"]
    assert near("sparsty", words) == ["sparsity", "sparse"]
    assert near("sparssity", words) == ["sparsity"]
    assert near("valve_bits", words) == ["value_bits"]
    assert near("setp", words) == ["step"]
    assert near("DENSE", words) == ["dense"]


def test_a_whole_part_is_near_too() -> None:
    assert near("bits", ["value_bits", "bytes"]) == ["value_bits"]
    assert near("local", ["localsgd", "sparse-local"]) == ["sparse-local"]


def test_words_with_many_different_letters_are_not_near() -> None:
    assert near("lr", ["link", "latency"]) == []
    assert near("momentum", ["min_numel", "node_size"]) == []
    assert near("x" * 100_000, ["dense"]) == []


def test_the_nearest_come_first_and_there_are_three_at_most() -> None:
    assert near("blocks.9", ["blocks.0", "blocks.1", "blocks.2"])[0] == "blocks.2"
    assert near("blocks.19", ["blocks.1", "blocks.2"]) == ["blocks.1", "blocks.2"]
    assert len(near("a1", [f"a{i}" for i in range(2, 9)])) == 3


def test_long_values_are_cut() -> None:
    assert shown("short") == "'short'"
    assert shown(["x" * 500]).endswith("... (504 characters)")
    assert len(shown("x" * 500)) < 160
