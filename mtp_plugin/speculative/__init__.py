"""The plugin: one speculative step, from the target's logits to the tokens of its requests."""
