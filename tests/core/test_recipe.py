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
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert parse_recipe(recipe.to_toml(), name=name) == recipe
        assert recipe.quantizes == (name != "bf16")


TILES, PORTABLE = "mxfp8 x mxfp8_32x32", "mxfp8_1x128 x mxfp8_128x128"
ROTATED = "mxfp4:sr + rht32:seeded"
STATIC = "e4m3*256 x fp8_128x128"
HEAD = ("last:1", "bf16", "bf16", "bf16")
# recipe: (match, products in order) of every rule
SHIPPED = {
    "bf16": [("*", "bf16", "bf16", "bf16")],
    "fp8-rowwise": [("*", "fp8_rowwise", "fp8_rowwise", "fp8_rowwise")],
    "fp8-tensorwise": [("*", *["fp8_tensorwise"] * 3), HEAD],
    "mxfp4-backward": [("*", TILES, ROTATED, ROTATED), HEAD],
    "mxfp8": [("*", TILES, TILES, "mxfp8")],
    "mxfp8-lowmem": [("*", TILES, TILES, "mxfp8 x mxfp4:even")],
    "mxfp8-portable": [("*", PORTABLE, PORTABLE, PORTABLE)],
    "mxfp8-rotated-wgrad": [("*", TILES, TILES, "mxfp8 + rht32:none")],
    "mxfp8-attention": [
        ("*", TILES, TILES, "mxfp8"),
        ("*", "mxfp8_32x32", TILES, "mxfp8_32x32", TILES, TILES, TILES),
    ],
    "fp8-attention": [
        ("*", PORTABLE, PORTABLE, PORTABLE),
        ("*", "fp8_128x128", STATIC, "fp8_128x128", "bf16", "bf16", "bf16"),
    ],
    "attention-safe": [
        ("*", TILES, TILES, "bf16"),
        ("*", "mxfp8_32x32", "bf16", "bf16", TILES, TILES, TILES),
        HEAD,
    ],
    "mxfp8-safe": [("*", TILES, TILES, "bf16"), HEAD],
    "nvfp4": [
        ("*", "nvfp4 x nvfp4_16x16", "nvfp4:sr x nvfp4_16x16", "nvfp4:sr x nvfp4 + rht16"),
        ("last:15%", "bf16", "bf16", "bf16"),
    ],
}


def test_shipped_recipes_decide_what_their_names_promise() -> None:
    assert {
        name: [
            (rule.match, *(str(product) for _, product in rule.policy.items()))
            for rule in load_recipe(name).rules
        ]
        for name in shipped_recipes()
    } == SHIPPED
    for name in SHIPPED:
        kinds = {rule.kind for rule in load_recipe(name).rules}
        assert kinds == ({"linear", "attention"} if "attention" in name else {"linear"})


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
        (":floor", ":", r"dgrad: unknown scale rule ''"),
        (":floor", ":flor", r"dgrad: unknown scale rule 'flor'.*did you mean floor"),
        ('"bf16"', '"BF16"', r"wgrad: unknown format 'BF16'; did you mean bf16"),
        ('"mxfp8:floor"', '"skip"', r"dgrad cannot be skipped; only wgrad can"),
        ('"bf16"', "16", r"wgrad must be a non-empty string, not 16"),
        ('kind = "linear"', 'kind = "liner"', r"unknown kind 'liner'; did you mean linear"),
        ('match = "*"', 'match = "first:0"', r"needs a count of at least 1"),
        ('match = "*"', 'match = "last:two"', r"needs a count of at least 1"),
        ('match = "*"', 'match = "first:²"', r"needs a count of at least 1.*digits 0 to 9"),
        ('match = "*"', 'match = "first:٣"', r"needs a count of at least 1.*digits 0 to 9"),
        ('match = "*"', 'match = "first:1\\n"', r"needs a count of at least 1"),
        ('match = "*"', 'match = "last:1000000"', r"at most 999999"),
        ('match = "*"', f'match = "first:{"9" * 5000}"', r"at most 999999"),
        ('why = "because"', 'why = ""', r"rule 1 \(match = '\*'\): why must be a non-empty string"),
        ('why = "because"', "", r"key 'why' is missing"),
        ("schema = 1", "schema = 2", r"schema is 2; this version reads schema 1"),
        ("schema = 1", "schema = true", r"schema is True; this version reads schema 1"),
        ("schema = 1", "schema = 1.0", r"schema is 1\.0; this version reads schema 1"),
        ("schema = 1", f"schema = {'9' * 5000}", r"is not TOML"),
        ("schema = 1", f"schema = 0x{'f' * 5000}", r"schema is this int"),
        ("schema = 1", f"schema = {'[' * 5000}", r"nested too deeply"),
        ("schema = 1", "schema = 1\ndefault = 1", r"unknown key 'default'"),
        ("[[rule]]", "[rule]", r"has no \[\[rule\]\]"),
        ("schema = 1", "schema = ", r"is not TOML"),
    ],
)
def test_bad_recipes(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_unknown_name_missing_file_and_binary(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean mxfp8"):
        load_recipe("mxfp")
    with pytest.raises(RecipeError, match=r"nowhere.toml: cannot be read"):
        load_recipe("./nowhere.toml")
    with pytest.raises(RecipeError, match=r"recipe 'a/\\x00.toml': is not the path of a file"):
        load_recipe("a/\0.toml")
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(binary)


def test_a_byte_order_mark_and_a_long_why_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_recipe(path) == parse_recipe(GOOD, name="mine")
    path.write_text(GOOD.replace("because", "because " * 20000))
    assert len(load_recipe(path).rules[0].why) == 160000


def test_counts_of_a_position() -> None:
    rule = parse_recipe(GOOD.replace('"*"', '"last:12"'), name="a").rules[0]
    assert rule.position(40) == ("last", 12)
    share = parse_recipe(GOOD.replace('"*"', '"last:15%"'), name="a").rules[0]
    assert [share.position(n) for n in (0, 1, 20, 21)] == [("last", n) for n in (0, 1, 3, 4)]
    assert parse_recipe(GOOD, name="a").rules[0].position(40) is None


@pytest.mark.parametrize("wrong", [3, None, b"mxfp8", ["mxfp8"]])
def test_something_that_is_no_name_says_what_to_pass(wrong: object) -> None:
    with pytest.raises(RecipeError, match=r"takes the name of a shipped recipe.*TOML file, not"):
        load_recipe(wrong)  # type: ignore[arg-type]


SCHEDULE = (
    GOOD
    + """
[[rule]]
match = "*"
kind = "linear"
fprop = "bf16"
dgrad = "bf16"
wgrad = "bf16"
last_fraction = 0.1
why = "end in bf16"
"""
)


def test_seed_and_schedule_round_trip_and_count_only_where_they_decide() -> None:
    recipe = parse_recipe(SCHEDULE, name="a")
    assert parse_recipe(recipe.to_toml(), name="a") == recipe
    assert [rule.scheduled for rule in recipe.rules] == [False, True]
    assert recipe.rules[1].start(1000) == 900
    with pytest.raises(RecipeError, match=r"last 0.1 of training: say how many steps"):
        recipe.rules[1].start(None)
    other = parse_recipe(SCHEDULE.replace("0.1", "0.2"), name="a")
    assert other.hash != recipe.hash
    step = parse_recipe(SCHEDULE.replace("last_fraction = 0.1", "from_step = 7"), name="a")
    assert parse_recipe(step.to_toml(), name="a") == step
    assert step.rules[1].start(None) == 7
    seeded = GOOD.replace("schema = 1", "schema = 1\nseed = 5")
    assert parse_recipe(seeded, name="a").hash == parse_recipe(GOOD, name="a").hash
    random = [text.replace('"bf16"', '"mxfp4:sr"') for text in (seeded, GOOD)]
    assert len({parse_recipe(text, name="a").hash for text in random}) == 2
    assert parse_recipe(parse_recipe(random[0], name="a").to_toml(), name="a").seed == 5


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 1", "schema = 1\nseed = -1", "seed must be a whole number from 0"),
        ("schema = 1", "schema = 1\nseed = true", "seed must be a whole number from 0"),
        ("last_fraction = 0.1", "last_fraction = 1", "between 0.0 and 1.0, not 1"),
        ("last_fraction = 0.1", "last_fraction = nan", "between 0.0 and 1.0, not nan"),
        ("last_fraction = 0.1", "from_step = 0", "from_step must be a whole number from 1"),
        ("last_fraction = 0.1", "from_step = 1\nlast_fraction = 0.1", "a schedule has one start"),
        ('match = "*"', 'match = "last:0%"', "a share from 1% to 99%"),
        ('match = "*"', 'match = "last:100%"', "a share from 1% to 99%"),
    ],
)
def test_bad_seeds_and_schedules(old: str, new: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_recipe(SCHEDULE.replace(old, new, 1), name="a")
