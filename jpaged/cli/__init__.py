"""The commands of `jpaged` that have no other home, and what they share.

plan.py, convert.py, bench.py, merge.py, store.py, chat.py and completion.py have a command each;
those of `jpaged serve` and `jpaged batch` are beside what they run. models.py names models,
absent.py compiles for chips that are not here, timing.py measures and prints tables.
jpaged/__main__.py finds a command by its name and imports it only then.
"""
