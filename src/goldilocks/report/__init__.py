"""A run directory as one page that people look at: plots, tables, answers, in one file that opens from disk.

A report is made of what is there. Whatever a run lacks is said in one line, on the page and on the terminal; a run that
is empty, half-written or still being written is no error. Nothing that a model or a data set wrote is ever markup.
"""

from goldilocks.report.write import Written, write_report

__all__ = ["Written", "write_report"]
