"""The dashboard at `/dashboard`, built with NiceGUI, which brings all its assets. Nothing is loaded from elsewhere.

    attach.py       adds the dashboard to the application
    guard.py        response headers and login tickets       login.py       login and logout
    page.py         the page and its tabs                    formatting.py  numbers as text
    series.py       samples of the metrics over time         tiles.py       figures and charts
    ask.py          ask a question and show the answer       documents.py   documents, uploads and jobs
    answers.py      the latest answers                       kvmap.js       the map of an answer's blocks

Text of users (questions, answers, names, documents) is shown in labels, table cells and component properties, which
display it as text. No string is interpreted as HTML or Markdown.
"""
