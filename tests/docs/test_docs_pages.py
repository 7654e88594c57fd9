"""The pages under docs/: generated parts are what the code says, links lead somewhere, Python blocks run."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

from kconvert.recipe import parse_recipe
from tests.docs.blocks import ROOT, find_blocks, run_blocks

PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMES = [page.name for page in PAGES]
LINK = re.compile(r"\]\(([^)#:\s]+)\)")
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)`")


@pytest.fixture(scope="module")
def generate() -> dict[str, object]:
    return runpy.run_path(str(ROOT / "docs" / "generate.py"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_generated_parts_are_what_the_code_says(page: Path, generate: dict[str, object]) -> None:
    text = page.read_text(encoding="utf-8")
    make = generate["generate"]
    assert callable(make)
    assert make(text) == text, f"docs/{page.name} is stale: run `make docs`"


def test_a_stale_part_shows(generate: dict[str, object]) -> None:
    make = generate["generate"]
    assert callable(make)
    stale = "<!-- generated: exit-codes -->\nold\n<!-- end -->"
    assert make(stale) != stale
    assert "| 130 | The run was stopped by the user. |" in make(stale)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=[*NAMES, "README.md"])
def test_links_and_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert broken == []
    assert [name for name in TEST.findall(text) if not (ROOT / name).is_file()] == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"(docs/{name})" not in text] == []


def test_recipes_on_the_pages_parse() -> None:
    recipes = [
        (page, block)
        for page in PAGES
        for block in find_blocks(page.read_text(encoding="utf-8"))
        if block.language == "yaml"
    ]
    assert recipes
    for page, block in recipes:
        parse_recipe(block.text, f"{page.name}:{block.line}")


@pytest.mark.parametrize("name", ["kernels.md", "loading.md", "recipe.md"])
def test_python_blocks_run(name: str, qwen3_dir: Path, converted_qwen3_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen3_dir, tmp_path / "my-model")
    shutil.copytree(converted_qwen3_dir, tmp_path / "my-model-kconvert")
    assert run_blocks(ROOT / "docs" / name, tmp_path) == {"python"}
