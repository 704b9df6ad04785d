"""`python -m specdec.cli`."""

from specdec.cli import main

main()
