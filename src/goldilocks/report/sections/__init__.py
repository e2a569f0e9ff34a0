"""The page's plots, one file per section, in the order of the page."""

from goldilocks.report.draw import Plot, Section, SectionMaker
from goldilocks.report.sections.learning import by_column, learning
from goldilocks.report.sections.prompts import lengths, pass_rates, rollouts
from goldilocks.report.sections.ratios import ratios
from goldilocks.report.sections.tokens import tokens

SECTIONS: tuple[SectionMaker, ...] = (learning, by_column, tokens, pass_rates, rollouts, lengths, ratios)

__all__ = ["SECTIONS", "Plot", "Section"]
