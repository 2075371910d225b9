"""``python -m opdtool`` is the same command as ``opdtool``."""

from opdtool.cli.main import main

if __name__ == "__main__":
    main()
