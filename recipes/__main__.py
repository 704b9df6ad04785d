"""`python -m recipes NAME OUT`."""

from recipes import main

main()
