"""Load time: checkpoint layout to the layout that the GEMMs read."""
