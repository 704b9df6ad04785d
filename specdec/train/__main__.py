"""`python -m specdec.train`: the same as `specdec zoo train`."""

from specdec.train import main

main()
