"""ragkv: a RAG service that reads every document once and reuses what the language model computed."""

__version__ = "0.1.0"
