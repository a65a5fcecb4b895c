"""Any attribute is an empty class: vLLM and transformers import names that text never uses."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
