"""An HTTP server with OpenAI's API over the embedded executor."""
# ruff: noqa: E402 - missing packages are reported before an import fails

from mtp_plugin.extras import SERVE_PACKAGES, require

require("mtp-plugin serve", *SERVE_PACKAGES, extra="serve")

from mtp_plugin.serving.app import make_app
from mtp_plugin.serving.server import Server, bind, serve
from mtp_plugin.serving.settings import ServerSettings

__all__ = ["Server", "ServerSettings", "bind", "make_app", "serve"]
