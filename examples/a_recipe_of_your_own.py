"""Write a recipe, see a mistake explained, and compare two plans before training anything."""

import tempfile
from pathlib import Path

from torch import nn

import lowprec

RECIPE = """
schema = 1
why = "MXFP8 in the body, the head in BF16"

[[rule]]
match = "*"
kind = "linear"
fprop = "mxfp8 x mxfp8_32x32"
dgrad = "mxfp8 x mxfp8_32x32"
wgrad = "mxfp8"
why = "default"

[[rule]]
match = "head"
kind = "linear"
fprop = "bf16"
dgrad = "bf16"
wgrad = "bf16"
why = "its output is the prediction"
"""

model = nn.ModuleDict(
    {"body": nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)), "head": nn.Linear(256, 16)}
)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mine.toml"
    path.write_text(RECIPE)
    mine = lowprec.plan(model, lowprec.load_recipe(path), hardware="b200")
    path.write_text(RECIPE.replace('"head"', '"haed"'))
    try:
        lowprec.plan(model, lowprec.load_recipe(path), hardware="b200")
    except lowprec.LowprecError as error:
        print(f"a typo is an error: {error}\n")

shipped = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="b200")
print("against the shipped recipe mxfp8:")
for line in shipped.diff(mine):
    print(" ", line)
