"""`python -m driver`: see driver/cli.py."""

import sys

from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    try:
        from driver.cli import main
    except ValueError as error:  # JAX reads its variables as it is imported
        if "JAX" not in str(error).upper():
            raise
        print(f"error: {error}: correct or unset the variable of this shell", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
