"""Recipes compared at equal cost: the same model, data and seeds, and every rollout charged.

A study is a folder of arms. An arm is a run directory with, once it has ended, its result. The table depends on the
results alone, so an interrupted and continued study has the same table as one without a break.
"""

from goldilocks.lab.compare.study import Study
from goldilocks.lab.compare.table import Table, make_table

__all__ = ["Study", "Table", "make_table"]
