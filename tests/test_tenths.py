"""`--tenth` runs a tenth of the tests."""

import pytest

from tests import conftest

pytest_plugins = "pytester"


def test_tenths_have_every_test_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('n', range(99))\ndef test_all(n): pass"
    )
    runs = [pytester.inline_run(f"--tenth={n}", plugins=[conftest]) for n in range(10)]
    ran = [[report.nodeid for report in run.listoutcomes()[0]] for run in runs]
    assert min(map(len, ran)) > 0, "cases of one test are spread"
    everything = [name for names in ran for name in names]
    assert sorted(everything) == sorted(set(everything))
    assert len(everything) == 99
