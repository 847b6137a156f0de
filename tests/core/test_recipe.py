"""Recipes: strict reading, shipped files, round trip, errors that name file, rule and way out."""

from pathlib import Path

import pytest

from lowprec.errors import RecipeError
from lowprec.recipe import load_recipe, parse_recipe, shipped_recipes

GOOD = """
schema = 1
why = "test"
[[rule]]
match = "*"
kind = "linear"
fprop = "mxfp8 x mxfp8_32x32"
dgrad = "mxfp8:floor"
wgrad = "bf16"
why = "because"
"""


def test_shipped_recipes_read_and_round_trip() -> None:
    assert set(shipped_recipes()) == {
        "bf16",
        "fp8-rowwise",
        "mxfp8",
        "mxfp8-portable",
        "mxfp8-safe",
    }
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert parse_recipe(recipe.to_toml(), name=name) == recipe
        assert recipe.quantizes == (name != "bf16")


def test_mxfp8_says_what_the_name_promises() -> None:
    policy = load_recipe("mxfp8").rules[0].policy
    assert str(policy.fprop) == str(policy.dgrad) == "mxfp8 x mxfp8_32x32"
    assert str(policy.wgrad) == "mxfp8"


def test_hash_covers_decisions_not_prose() -> None:
    recipe = parse_recipe(GOOD, name="a")
    assert recipe.hash == parse_recipe(GOOD.replace("because", "no reason"), name="b").hash
    assert recipe.hash != parse_recipe(GOOD.replace(":floor", ""), name="a").hash


def test_odd_text_survives_the_round_trip() -> None:
    text = GOOD.replace('"because"', '"quote \\" backslash \\\\ newline \\n tab \\t del \\u007f é"')
    recipe = parse_recipe(text, name="odd")
    assert parse_recipe(recipe.to_toml(), name="odd") == recipe


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("match", "mtch", r"rule 1: unknown key 'mtch'; did you mean match"),
        ('"mxfp8 x mxfp8_32x32"', '"mxfp8 x mxfp8_32x3"', r"fprop: unknown format 'mxfp8_32x3'"),
        (":floor", ":flor", r"dgrad: unknown scale rule 'flor'.*did you mean floor"),
        ('"bf16"', '"BF16"', r"wgrad: unknown format 'BF16'"),
        ('"bf16"', "16", r"wgrad must be a non-empty string, not 16"),
        ('kind = "linear"', 'kind = "liner"', r"unknown kind 'liner'; did you mean linear"),
        ('match = "*"', 'match = "first:0"', r"needs a count of at least 1"),
        ('match = "*"', 'match = "last:two"', r"needs a count of at least 1"),
        ('why = "because"', 'why = ""', r"rule 1 \(match = '\*'\): why must be a non-empty string"),
        ('why = "because"', "", r"key 'why' is missing"),
        ("schema = 1", "schema = 2", r"schema is 2; this version reads schema 1"),
        ("schema = 1", "schema = 1\ndefault = 1", r"unknown key 'default'"),
        ("[[rule]]", "[rule]", r"has no \[\[rule\]\]"),
        ("schema = 1", "schema = ", r"is not TOML"),
    ],
)
def test_bad_recipes(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_unknown_name_missing_file_and_binary(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean mxfp8"):
        load_recipe("mxfp")
    with pytest.raises(RecipeError, match=r"nowhere.toml: cannot be read"):
        load_recipe("./nowhere.toml")
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(binary)
