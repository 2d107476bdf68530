"""DAPO: algos/dapo.py."""

from tests.specs import Curve, Spec, parse_bugs

BUGS = """
"""
