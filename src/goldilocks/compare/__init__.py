"""Recipes side by side at equal cost: the same model, data and seeds, every rollout charged.

A study is a folder of arms. An arm is a run directory and, once it has ended, its result; the table is a function of
the results and of nothing else, so that a study which was interrupted comes to a table like one that was not.
"""

from goldilocks.compare.study import Study
from goldilocks.compare.table import Table, make_table

__all__ = ["Study", "Table", "make_table"]
