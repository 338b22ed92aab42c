"""Reads a folder: `python -m dejakv.attack.read_folder FOLDER IDS`."""

from dejakv.attack.reading import main
from dejakv.store.open import open_store

if __name__ == "__main__":
    main(open_store)
