"""A run directory as one HTML file with plots, tables and answers.

A report shows what the run has. What is missing is named in one line each, on the page and on the terminal; an empty,
incomplete or running run is not an error. Text of models and data sets is always escaped.
"""

from goldilocks.lab.report.page import Written, write_report

__all__ = ["Written", "write_report"]
