"""The bundled models, whose folders `dejakv.models` reads, and the made-up worlds that they were trained on (`docs`, `shapes`)."""
