"""Models to compare with: a Transformer with a choice of position encodings, and numbers as outputs."""

from .scalar_regression import ScalarOutput, ScalarRegression
from .transformer import POSITIONS, DecoderTransformer, Positions

__all__ = ["POSITIONS", "DecoderTransformer", "Positions", "ScalarOutput", "ScalarRegression"]
