"""dpt.py against numbers computed another way."""
