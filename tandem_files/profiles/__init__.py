"""Profiles of train steps in the run's folder: the trainer writes them, `tandem profile` reads them."""
