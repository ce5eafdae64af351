"""What the documentation site shows besides the pages of docs/: `make docs` builds it with MkDocs."""
