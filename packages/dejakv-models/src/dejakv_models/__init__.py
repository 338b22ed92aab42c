"""The bundled models and the made-up worlds that they were trained on (`docs`, `shapes`).

`dejakv.models` reads the folders of the models.
"""
