"""From a log of prompts to settings: what reuse would save, and how often it would be wrong, without answering anything."""
