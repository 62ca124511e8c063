"""Pictures: a report of runs, and what a dry run says, each as one HTML file that works offline.

Python computes the numbers and writes charts as Vega-Lite specifications, which are plain dicts;
``page.js`` draws them in the browser. Nothing here runs while a model is trained.

Read first: run_report.py, then curves.py; dry_run_page.py for dry runs.
"""
