"""RIQL: algos/riql.py."""

from tests.specs import Spec, parse_bugs
from tests.specs.iql import SPEC as PARENT

BUGS = """
TODO-what-the-mistake-is: TODO why people make it; one block for each line of the idea that can be wrong
- TODO a line of algos/riql.py that iql.py lacks
+ TODO the same line with the mistake
"""

SPEC = Spec(
    "RIQL, arXiv 0000.00000",
    PARENT.family,
    small=PARENT.small,
    tests="exact_riql " + PARENT.tests,
    no_recipe="TODO why the paper's settings cannot be a command",
    flags=PARENT.flags,
    special=PARENT.special,
    noise=PARENT.noise,
    walk=PARENT.walk,
    bugs=parse_bugs(BUGS),
)
