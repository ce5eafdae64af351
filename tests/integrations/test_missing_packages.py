"""Without the package of its framework, a component says what to install. Everything else works without it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder

import pytest

from ragkv.errors import ConfigError, MissingPackage

FRAMEWORKS = {
    "langchain": ("langchain_core", "langchain-core"),
    "llamaindex": ("llama_index", "llama-index-core"),
    "haystack": ("haystack", "haystack-ai"),
}


@pytest.fixture
def without(monkeypatch):
    """A function that hides a package, as if it was not installed."""

    def hide(package):
        class Finder(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] == package else super().find_spec(name, path, target)

        monkeypatch.setattr(sys, "meta_path", [Finder if each is PathFinder else each for each in sys.meta_path])
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)

    return hide


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_component_says_what_to_install(framework, without, monkeypatch):
    package, distribution = FRAMEWORKS[framework]
    without(package)
    monkeypatch.delitem(sys.modules, f"ragkv.integrations.{framework}", raising=False)
    with pytest.raises(MissingPackage, match=f"extra {framework} is not installed: pip install '{distribution}>="):
        importlib.import_module(f"ragkv.integrations.{framework}")


def test_the_connector_says_that_it_is_a_part_of_vllm(without, monkeypatch):
    without("vllm")
    monkeypatch.delitem(sys.modules, "ragkv.integrations.vllm", raising=False)
    with pytest.raises(MissingPackage, match="a part of vLLM's engine, which is not installed here"):
        importlib.import_module("ragkv.integrations.vllm")


def test_the_error_is_one_of_imports_and_of_settings():
    assert issubclass(MissingPackage, ImportError)
    assert issubclass(MissingPackage, ConfigError)
