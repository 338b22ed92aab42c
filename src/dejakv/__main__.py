"""`python -m dejakv`: the console script."""

from dejakv.cli.main import app

if __name__ == "__main__":
    app()
