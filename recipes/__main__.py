"""`python -m recipes NAME …`."""

from recipes import main

main()
