"""Root-mean-square norms, with the residual added in front or two halves joined behind."""
