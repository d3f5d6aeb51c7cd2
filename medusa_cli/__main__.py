"""`python -m medusa_cli` is `medusa`."""

from medusa_cli.cli.app import main

main()
