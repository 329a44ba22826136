"""`tandem init`: a commented configuration from a model folder and a data file."""
