"""The product's face: a small GPT, fitted to half its activation memory and trained to the same losses.

Run it with ``make demo``, or anywhere with ``recoup demo``. The model and what is done with it are in `recoup.demo`.
"""

from recoup import cli


def main() -> int:
    """As ``recoup demo``."""
    return cli.main(["demo"])


if __name__ == "__main__":
    raise SystemExit(main())
