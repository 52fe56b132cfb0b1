"""Planning of any captured program: its parts, its time on a mesh, its stages, and the search over meshes, layouts and stages."""
