"""Puts Goldilocks' config groups on the search path of every Hydra program, verl's own ``main_ppo`` among them.

Hydra finds this by its place: a package inside the namespace package ``hydra_plugins``.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class GoldilocksSearchPath(SearchPathPlugin):
    """Appends, so that a group of the program's own with the same name wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="goldilocks", path="pkg://goldilocks.config")
