"""The command `hetjax train`, by path: python experiments/train.py is the same program."""

import sys

from hetjax.__main__ import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
