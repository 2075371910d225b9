"""``python -m opdtool`` is the same command as ``opdtool``."""

from opdtool.cli.start import main

if __name__ == "__main__":
    main()
