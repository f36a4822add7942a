"""Which cases of a long table are quick."""

import pytest

from tests.conftest import pytest_collection_modifyitems


class Case:
    """What the hook asks of an item of pytest."""

    def __init__(self, nodeid, **marks):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


def quick_ones(items):
    pytest_collection_modifyitems(items)
    return [item.nodeid for item in items if not item.get_closest_marker("slow")]


@pytest.mark.parametrize("number, kept", [(1, [0]), (3, [0, 2, 4]), (9, [*range(6)])])
def test_some_cases_evenly_spaced_are_quick(number, kept):
    mark = pytest.mark.quick(number).mark
    items = [Case(f"test.py::test_a[{i}]", quick=mark) for i in range(6)]
    other = Case("test.py::test_b")
    found = quick_ones([*items, other])
    assert found == [*(items[i].nodeid for i in kept), other.nodeid]


def test_cases_that_are_slow_do_not_count():
    mark, slow = pytest.mark.quick(2).mark, pytest.mark.slow.mark
    items = [Case(f"test.py::test_a[{i}]", quick=mark) for i in range(4)]
    items[0].marks["slow"] = slow
    assert quick_ones(items) == ["test.py::test_a[1]", "test.py::test_a[2]"]
