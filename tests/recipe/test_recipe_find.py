"""Finding a recipe: a file first, then a shipped one by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import kconvert
from kconvert.errors import RecipeError
from kconvert.recipe import find_recipe, load_recipe, shipped_recipes
from kconvert.recipe.shipped import _recipe_folder


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped recipes, and an empty working directory."""
    folder, work = tmp_path / "recipes", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    for name in ("qwen3.yaml", "llama.yaml", "qwen3-moe.yaml", "README.md"):
        (folder / name).write_text("x")
    (folder / "folder.yaml").mkdir()
    monkeypatch.setattr("kconvert.recipe.shipped._recipe_folder", lambda: folder)
    monkeypatch.chdir(work)
    return folder


def test_shipped_recipes_are_sorted_files(shipped: Path) -> None:
    assert list(shipped_recipes()) == ["llama", "qwen3", "qwen3-moe"]
    assert shipped_recipes()["llama"] == shipped / "llama.yaml"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.yaml"])
def test_by_name(shipped: Path, name: str) -> None:
    assert find_recipe(name) == shipped / "qwen3.yaml"


def test_a_file_comes_first_and_a_folder_does_not(shipped: Path) -> None:
    Path("llama.yaml").write_text("mine")
    assert find_recipe("llama.yaml") == Path("llama.yaml")
    Path("qwen3").mkdir()
    assert find_recipe("qwen3") == shipped / "qwen3.yaml"
    Path("qwen3-moe").write_text("mine")
    assert find_recipe("qwen3-moe") == Path("qwen3-moe")


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", ["qwen4", "qwen4.yaml", "recipes/qwen4.yaml"])
def test_unknown_names_get_near_misses_and_the_list(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_recipe(name)
    assert f"no recipe file or shipped recipe {name!r}" in str(caught.value)
    assert "did you mean 'qwen3'" in str(caught.value)
    assert "shipped recipes: llama, qwen3, qwen3-moe" in str(caught.value)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", ["", ".", "..", "../recipes/qwen3", "a\0b", "x" * 5000, "/"])
def test_odd_names(name: str) -> None:
    with pytest.raises(RecipeError):
        find_recipe(name)


def test_where_recipes_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(kconvert.__file__).parent
    assert _recipe_folder() in (root / "_recipes", root.parent / "recipes")
    package = tmp_path / "kconvert"
    package.mkdir()
    monkeypatch.setattr("importlib.resources.files", lambda name: tmp_path / name)
    assert _recipe_folder() == tmp_path / "recipes"
    assert shipped_recipes() == {}
    (package / "_recipes").mkdir()
    assert _recipe_folder() == package / "_recipes"


def test_every_shipped_recipe_is_valid() -> None:
    for name, path in shipped_recipes().items():
        assert load_recipe(path).name == name
