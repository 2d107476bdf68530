"""DAPO: algos/dapo.py."""


BUGS = """
"""
