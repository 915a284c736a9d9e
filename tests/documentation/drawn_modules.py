"""Draw twelve modules of the product, to test whether a reader guesses from its path what a module contains.

    PYTHONPATH=tests python -m documentation.drawn_modules --seed 1

prints their paths. The same seed draws the same ones.
"""

import argparse
from pathlib import Path
from random import Random

TOP = Path(__file__).resolve().parents[2]
COUNT = 12


def drawn(seed: int) -> list[str]:
    paths = (path for root in ("reference", "optimized", "harness") for path in (TOP / root).rglob("*.py"))
    names = sorted(str(path.relative_to(TOP)) for path in paths if path.stem not in ("__init__", "__main__"))
    return Random(seed).sample(names, COUNT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw twelve modules of the product.")
    parser.add_argument("--seed", type=int, default=0)
    print("\n".join(drawn(parser.parse_args().seed)))
