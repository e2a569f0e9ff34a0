"""Features and strata of prompts: from the text, from columns of the data, or from a model."""

from goldilocks.features.matrix import Features, Standard, feature_matrix, text_features, with_intercept
from goldilocks.features.strata import StrataSettings

__all__ = ["Features", "Standard", "StrataSettings", "feature_matrix", "text_features", "with_intercept"]
