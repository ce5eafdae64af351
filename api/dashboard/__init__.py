"""The dashboard: `/dashboard`, drawn by NiceGUI, which brings all its assets; nothing is loaded from elsewhere.

    attach.py     joins it to the service          guard.py, login.py    what its responses may do; who may come in
    page.py       the page                         series.py   the tally over time
    tiles.py      figures and charts               ask.py      a question, its answer, and what was read for it
    papers.py     documents and jobs               answered.py, kvmap.js   the latest answers; the map of what was read

What people wrote (questions, answers, names, texts of documents) goes into labels, table cells and properties of
components, which show it as text. Nothing here makes HTML or Markdown out of a string.
"""
