"""``python -m recoup``."""

from recoup.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
