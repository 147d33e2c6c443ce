"""Copy the recipes to a folder."""

import argparse

from hf_recurrent_lengthgen.recipes import copy_recipes

parser = argparse.ArgumentParser(prog="python -m hf_recurrent_lengthgen.recipes", description=__doc__)
parser.add_argument("folder", help="a folder that does not exist yet")
try:
    print(f"Copied to {copy_recipes(parser.parse_args().folder)}. Next: its README.md")
except ValueError as error:
    parser.error(str(error))
