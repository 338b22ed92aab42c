"""Reads folders: `python -m dejakv.attack.read_folder IDS FOLDER...`."""

from dejakv.attack.reading import main
from dejakv.store.open import open_store

if __name__ == "__main__":
    main(open_store)
