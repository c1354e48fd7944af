"""The slowest tests of JUnit reports: `python tests/slowest.py build/tests/*.xml`."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

SHOWN = 10


def durations(report: str) -> list[tuple[float, str]]:
    """Seconds and name of each test of a report, set-up and tear-down included."""
    cases = ElementTree.parse(report).iter("testcase")
    return [(float(case.attrib["time"]), f"{case.attrib['classname']}::{case.attrib['name']}") for case in cases]


if __name__ == "__main__":
    tests = sorted((test for report in sys.argv[1:] for test in durations(report)), reverse=True)
    for seconds, name in tests[:SHOWN]:
        print(f"{seconds:7.1f} s  {name}")
    print(f"{sum(seconds for seconds, _ in tests):7.1f} s  {len(tests)} tests together")
