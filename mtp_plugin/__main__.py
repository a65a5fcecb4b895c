"""The command ``mtp-plugin``, which is ``python -m mtp_plugin`` as well."""

from mtp_plugin.extras import COMMAND_LINE_PACKAGES, require_or_exit


def main() -> None:
    """Run the command line where its packages are installed, else say in one line what is not."""
    require_or_exit("the command line mtp-plugin", *COMMAND_LINE_PACKAGES)
    from mtp_plugin import cli

    cli.main()


if __name__ == "__main__":
    main()
