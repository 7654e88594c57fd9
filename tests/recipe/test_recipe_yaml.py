"""The text level of recipes: encodings, YAML syntax, and the YAML features that are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.errors import RecipeError
from kconvert.recipe import MAX_RECIPE_BYTES, load_recipe, parse_recipe

GOOD = """\
recipe: 1
name: qwen3
model_type: [qwen3]
patches:
  - kernel: cpu_fused_swiglu
    replace:
      class: Qwen3MLP
      path: "model.layers.*.mlp"
"""


def fault(text: bytes | str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert "http" not in message
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("data", [GOOD, GOOD.encode(), GOOD.replace("\n", "\r\n"), "# a comment\n---\n" + GOOD])
def test_good_text_is_read_and_kept_verbatim(data: bytes | str) -> None:
    recipe = parse_recipe(data, "r.yaml")
    assert recipe.name == "qwen3"
    assert recipe.text == (data if isinstance(data, str) else data.decode())
    assert recipe.path is None


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + GOOD.encode(), "\ufeff" + GOOD])
def test_byte_order_mark(data: bytes | str) -> None:
    error = fault(data)
    assert error.where == "r.yaml:1"
    assert "byte order mark" in error.what


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_unicode_encodings(encoding: str) -> None:
    error = fault(GOOD.encode(encoding))
    assert error.where == "r.yaml:1"
    assert "not UTF-8" in error.what


def test_latin_1_names_the_line() -> None:
    error = fault(GOOD.replace("name: qwen3", "name: qwén3").encode("latin-1"))
    assert error.where == "r.yaml:2"
    assert "not UTF-8: byte 0xe9" in error.what


@pytest.mark.parametrize(("char", "shown"), [("\x00", "U+0000"), ("\x07", "U+0007"), ("\ud800", "")])
def test_characters_that_yaml_has_not(char: str, shown: str) -> None:
    error = fault(GOOD.replace("qwen3\n", f"qwen3{char}\n", 1))
    assert error.where == "r.yaml:2"
    assert shown in error.what


def test_size_limit() -> None:
    padding = "#" * (MAX_RECIPE_BYTES - len(GOOD))
    assert parse_recipe(GOOD + padding, "r.yaml").name == "qwen3"
    assert "larger than 1000000 bytes" in fault(GOOD + padding + "#").what


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "~", "null"])
def test_empty(text: str) -> None:
    error = fault(text)
    assert error.where == "r.yaml:1"
    assert "empty" in error.what or "has no value" in error.what


@pytest.mark.parametrize(
    ("text", "line"),
    [("recipe: 1\n\tname: x\n", 2), ("recipe: 1\nname:\tx\n", 2), ("recipe: 1\nx:\n\t- 1\n", 3)],
)
def test_tabs(text: str, line: int) -> None:
    error = fault(text)
    assert error.where == f"r.yaml:{line}"
    assert error.fix == "indent with spaces, not tabs"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("recipe: 1\nname: [a\n", 3),
        ("recipe: 1\nname: 'a\n", 3),
        ("recipe: 1\nname: a: b\n", 2),
        ("recipe: 1\n  name: a\n", 2),
        ("recipe: 1\n- a\n", 2),
        ("recipe: 1\nname: @a\n", 2),
        ("recipe: 1\nname: {class: X, path: layers.{0-3}.mlp}\n", 2),
        ("recipe: 1\nname: *.mlp\n", 2),
        ("%YAML 3.0\n---\nrecipe: 1\n", 1),
        ("%FOO\n---\nrecipe: 1\nname: !e!x y\n", 4),
    ],
)
def test_syntax_errors(text: str, line: int) -> None:
    error = fault(text)
    assert error.where == f"r.yaml:{line}"


def test_syntax_error_says_what_to_quote() -> None:
    assert "quote values that hold any of *" in str(fault("recipe: 1\nname: *.mlp\n"))


@pytest.mark.parametrize(
    ("text", "line"), [(GOOD + "---\n" + GOOD, 9), (GOOD + "...\n---\nx\n", 10), ("---\n---\nx", 2)]
)
def test_second_document(text: str, line: int) -> None:
    error = fault(text)
    assert error.where == f"r.yaml:{line}"
    assert "second document" in error.what


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("recipe: 1\nname: &a qwen3\n", 2, "anchor &a"),
        ("recipe: 1\npatches: &p\n  - x\n", 2, "anchor &p"),
        ("recipe: 1\n&k name: x\n", 2, "anchor &k"),
        ("recipe: 1\nname: *a\n", 2, "alias *a"),
        ("recipe: 1\nname: !!python/object:os.system x\n", 2, "tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("recipe: 1\nname: !!python/object/apply:os.system ['true']\n", 2, "python/object/apply"),
        ("recipe: 1\nname: !x y\n", 2, "tag '!x'"),
        ("recipe: 1\nname: ! y\n", 2, "tag '!'"),
        ("recipe: 1\nname: !!str y\n", 2, "tag 'tag:yaml.org,2002:str'"),
        ("recipe: 1\npatches: !!seq\n  - x\n", 2, "tag 'tag:yaml.org,2002:seq'"),
        ("!!map\nrecipe: 1\n", 1, "tag 'tag:yaml.org,2002:map'"),
        ("recipe: 1\n!k name: x\n", 2, "tag '!k'"),
        ("recipe: 1\n<<: {name: x}\n", 2, "merge key"),
        ("recipe: 1\n1: x\n", 2, "a key must be a string, not the number 1"),
        ("recipe: 1\ntrue: x\n", 2, "a key must be a string, not true"),
        ("recipe: 1\n~: x\n", 2, "a key must be a string, not nothing"),
        ("recipe: 1\n[a]: x\n", 2, "not a list or mapping"),
        ("recipe: 1\n? {a: b}\n: x\n", 2, "not a list or mapping"),
        ("recipe: 1\nname: " + "x" * 1001 + "\n", 2, "1001 characters"),
        ("recipe: 1\n" + "x" * 1001 + ": 1\n", 2, "characters"),
    ],
)
def test_refused_yaml_features(text: str, line: int, what: str) -> None:
    error = fault(text)
    assert error.where == f"r.yaml:{line}"
    assert what in error.what


def test_duplicate_keys_name_both_lines() -> None:
    error = fault(GOOD + "name: again\n")
    assert error.where == "r.yaml:9"
    assert "key 'name' appears twice, first on line 2" in error.what
    nested = fault(GOOD.replace("    replace:\n", "    replace:\n      class: Other\n"))
    assert nested.where == "r.yaml:8"
    assert "'class' appears twice, first on line 7" in nested.what


def test_duplicate_keys_in_quotes_are_duplicates() -> None:
    assert "appears twice, first on line 1" in fault('recipe: 1\n"recipe": 1\n').what


def test_several_faults_give_the_first_and_a_count() -> None:
    error = fault("recipe: 1\nrecipe: 1\nrecipe: 1\n1: x\n")
    assert error.where == "r.yaml:2"
    assert "(and 2 more problems)" in str(error)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "\n".join(" " * n + "- " for n in range(100))])
def test_deep_nesting(text: str) -> None:
    error = fault(text)
    assert "levels deep" in error.what or "not valid YAML" in error.what


@pytest.mark.parametrize(
    ("unit", "line"),
    [("- a\n", 20_000), ("a: 1\n", 10_000), ("? a\n", 10_001), ("[],", 1), ("{a: b},", 1), ("a:,", 1)],
)
def test_a_megabyte_of_small_values_is_refused_early(unit: str, line: int) -> None:
    text = unit * (MAX_RECIPE_BYTES // len(unit) - 1)
    if unit.endswith(","):
        text = f"{{{text}}}" if unit == "a:," else f"[{text}]"
    start = time.process_time()
    error = fault(text)
    assert time.process_time() - start < 5  # about 0.5 s; 6 to 17 s without the limit
    assert error.where == f"r.yaml:{line}"
    assert "more than 20000 keys and values" in error.what


def test_hundreds_of_patch_entries_fit() -> None:
    entry = GOOD.partition("patches:\n")[2]
    assert len(parse_recipe(GOOD + entry * 1000, "r.yaml").patches) == 1001


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "no", "y", "n", "No", "True", "1.0", "1e5", "010", "0x1F", "2024-01-01"]
)
def test_words_of_yaml_1_1_are_the_strings_that_were_written(word: str) -> None:
    text = GOOD.replace("name: qwen3", f"name: {word}").replace("[qwen3]", f"[{word}]")
    recipe = parse_recipe(text, "r.yaml")
    assert recipe.name == word
    assert recipe.model_type == (word,)


@pytest.mark.parametrize(
    ("value", "fix"), [("true", "quote it: 'true'"), ("false", "quote it: 'false'"), ("3", "quote it: '3'")]
)
def test_true_and_numbers_are_no_strings(value: str, fix: str) -> None:
    error = fault(GOOD.replace("name: qwen3", f"name: {value}"))
    assert error.where == "r.yaml:2"
    assert error.fix == fix


def test_load_keeps_path_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    recipe = load_recipe(file)
    assert recipe.path == file
    assert recipe.text == GOOD
    assert recipe.patches[0].where == f"{file}:5"
    file.write_text(GOOD.replace("name:", "nmae:"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert str(caught.value).startswith(f"{file}:2: unknown key 'nmae'")


def test_load_of_what_is_no_file(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none.yaml", "No such file"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(RecipeError, match=reason) as caught:
            load_recipe(path)
        assert caught.value.exit_code == 3


def test_load_reads_no_more_than_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as out:
        out.truncate(10**12)  # sparse
    with pytest.raises(RecipeError, match="larger than 1000000 bytes"):
        load_recipe(file)


YAML_BITS = st.lists(
    st.sampled_from(
        [
            *GOOD.splitlines(keepends=True),
            *"[]{}:,-#&*!|>'\"%@`? \n\t\x85\ufeff~1é",
            *(
                "  ",
                "<<: ",
                "---\n",
                "true",
                "recipe",
                "kernel: ",
                "fuse:\n",
                "- ",
                "version: 1\n",
                "class: ",
                "path: ",
            ),
            "trust_remote_code: yes\n",
        ]
    ),
    max_size=40,
).map("".join)


def message_of(data: bytes | str) -> str | None:
    """The message of the recipe error, or None where the recipe is good; any other error goes through."""
    try:
        parse_recipe(data, "r.yaml")
    except RecipeError as error:
        return str(error)
    return None


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), YAML_BITS))
def test_nothing_but_recipe_errors(data: bytes | str) -> None:
    message = message_of(data)
    assert message is None or (message.startswith("r.yaml:") and "\n" not in message)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 12), YAML_BITS)
def test_a_damaged_recipe_gives_nothing_but_recipe_errors(start: int, length: int, middle: str) -> None:
    message = message_of(GOOD[:start] + middle + GOOD[start + length :])
    assert message is None or (message.startswith("r.yaml:") and "\n" not in message)
