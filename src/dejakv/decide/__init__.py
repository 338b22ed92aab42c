"""Finding: donors by the levels, judged by the guards, made into a plan. One finder serves every engine and server."""
