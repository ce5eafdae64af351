"""A ragkv service as components of other frameworks: `langchain`, `llamaindex`, `haystack`.

Each module needs the package of its framework, which the extra of the same name installs. They use `ragkv.client`, so
they need neither torch nor a model.
"""
