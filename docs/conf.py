import replicax

project = "Replicax"
author = "The Replicax authors"
copyright = author
release = replicax.__version__
version = ".".join(release.split(".")[:2])

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Replicax {release}"

# Pages with code cells are executed anew for every build. An error is a warning with
# its traceback, and warnings fail the build.
nb_execution_mode = "force"
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# References to our own names must resolve. Those into other libraries would need their
# inventories, and a build must not need the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:func", r"(iter|len|next)"),
    # Named in signatures, and not for users to make or to name.
    (r"py:class", r"replicax\.datasets\.\w+\.(Feed|ArrayIterator|FileIterator)"),
    (r"py:class", r"replicax\.datasets\.file_rows\.CountedFile"),
    (r"py:.*", r"(jax|jaxlib|np|numpy|flax|nnx|optax)\..*"),
    (r"py:.*", r"(collections|contextlib|enum|os|types|typing)\..*"),
]


def resolve_public_name(app, env, node, contnode):
    """Finds ``PerReplica`` and ``replicax.values.PerReplica`` in the reference.

    A name is documented where users import it from, ``replicax.PerReplica``, and
    mentioned as the code that defines it knows it.
    """
    name = node.get("reftarget", "").rpartition(".")[2]
    for package in (replicax, replicax.datasets):
        if name in package.__all__:
            return env.get_domain("py").resolve_xref(
                env,
                node["refdoc"],
                app.builder,
                "obj",
                f"{package.__name__}.{name}",
                node,
                contnode,
            )
    return None


def keep_colons(app, what, name, obj, options, lines):
    """Keeps a colon in a property's first line from being read as "type: text"."""
    if what == "property":
        lines[:0] = ["..", ""]


def setup(app):
    app.connect("missing-reference", resolve_public_name)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
