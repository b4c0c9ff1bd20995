"""The examples in docstrings are true: every module of `schemas`, and every other light module that has some."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import schemas

MODULES = sorted(info.name for info in pkgutil.walk_packages(schemas.__path__, prefix="schemas."))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), raise_on_error=False)

    assert failures == 0


def test_there_are_examples_to_run() -> None:
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)

    assert attempted > 10
