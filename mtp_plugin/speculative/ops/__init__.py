"""Pure tensor steps of multi-token prediction, one folder each."""
