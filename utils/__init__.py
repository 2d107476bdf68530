"""A regular package, so that one called utils elsewhere on PYTHONPATH does not hide it."""
