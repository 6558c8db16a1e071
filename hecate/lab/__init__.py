"""Small studies: each answers one question with a table and a figure, in minutes on two cores.

    hecate lab                  # which there are
    hecate lab levels --quick   # a table on the screen; levels-quick.csv, .json and .png in lab/

A study is one file here: a subclass of `Study` with a name, a sentence and `run`.
"""

from hecate.lab.study import Progress, Result, Spread, Study, find_study, studies

__all__ = ["Progress", "Result", "Spread", "Study", "find_study", "studies"]
