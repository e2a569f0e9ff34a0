"""Tensor maths that verl lacks. Imports without verl; the plug-in registers it with verl."""
