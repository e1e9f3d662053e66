"""Engines have other machines measure: the same supervisor runs there, and its rows come back into one run folder.

``kinds`` says which nodes of a cluster are asked for, ``parcel`` what they are sent, ``node`` runs there, ``gathering``
writes down here what they tell, ``cluster`` is the run as a whole. Only ``ray_engine`` imports Ray.
"""
