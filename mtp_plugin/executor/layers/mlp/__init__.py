"""The gated activation of a feed-forward layer whose two projections come as one product."""
