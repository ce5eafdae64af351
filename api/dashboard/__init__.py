"""The dashboard at `/dashboard`, built with NiceGUI, which brings all its assets. Nothing is loaded from elsewhere.

    attach.py       adds the dashboard to the application
    guard.py        response headers and login tickets       login.py       login and logout
    page.py         the page and its tabs                    formatting.py  numbers as text
    buttons.py      the two kinds of buttons                 style.css      colours and layout

    ask.py          the Ask tab: form and thread             start.py       the empty start
    examples.py     questions that are answered              history.py     the questions at the side; history.js
    answer_card.py  a question and its answer                answer.js      the answer and its passages
    answer_text.py  what is said about an answer             export.py      a conversation as a file
    passage_form.py Markdown and fixed faces                 kvmap.js       the map of an answer's blocks

    documents.py    the Documents tab                        documents.js   the table
    document_rows.py  its rows, folders and tags
    jobs.py         the ingest jobs                          dropzone.js    uploads and their progress
    viewer.py       one document                             moment.js      a moment in the browser's time zone

    overview.py     the Overview tab                         answers.py     the latest answers
    tiles.py        figures                                  charts.py      charts
    ranges.py       the range of time that is shown          range.js       its choice
    series.py       samples of the metrics over time         terms.py       the terms; term.js explains them

Text of users (questions, answers, names, documents) is shown in labels, table cells and component properties, which
display it as text. No string is interpreted as HTML. Markdown of passages becomes elements of a list.
"""
