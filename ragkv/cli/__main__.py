"""`python -m ragkv.cli` is the program `ragkv`."""

from ragkv.cli import main

main()
