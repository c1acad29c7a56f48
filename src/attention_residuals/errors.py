"""UserError: something the user of a command can mend, told in one line."""


class UserError(Exception):
    """Raised for input that a user can mend (a missing file, empty data, a damaged checkpoint).

    The command line prints its message as one line and exits with status 2, without a traceback.
    """
