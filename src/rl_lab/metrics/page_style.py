"""The style sheet of the report and the comparison: one column, light and dark, laptop and phone."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1f2328;--quiet:#667080;--line:#e2e4e8;
  --accent:#2f86c8;--good:#1a7f5a;--warn:#a65a00;--bad:#b3261e}
@media(prefers-color-scheme:dark){
  :root{--ground:#14171a;--card:#1c2024;--ink:#e4e7ea;--quiet:#98a2ae;--line:#31373d;--accent:#5aa9e0;
    --good:#4cc296;--warn:#e0a050;--bad:#f0867e}
}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.2rem;margin:0 0 4px}
h3{font-size:1rem;margin:14px 0 2px}
p{margin:4px 0 10px}
.quiet{color:var(--quiet)}
.small{font-size:.86rem}
section,details.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;
  margin:16px 0}
summary{cursor:pointer;font-weight:600}
details[open]>summary{margin-bottom:10px}
.badge{display:inline-block;padding:1px 10px;border-radius:99px;border:1px solid currentColor;font-size:.82rem;
  font-weight:600;vertical-align:3px;margin-left:8px}
.good{color:var(--good)}
.warn{color:var(--warn)}
.bad{color:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(126px,1fr));gap:12px;margin-top:14px}
.facts div{border-left:3px solid var(--line);padding-left:10px}
.facts b{display:block;font-size:1.25rem;line-height:1.25}
.facts .main{border-color:var(--accent);grid-column:span 2}
.facts .main b{font-size:1.7rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:18px}
.grid figure{margin:0;min-width:0}
.grid p{margin:2px 0 0;color:var(--quiet);font-size:.84rem;line-height:1.4}
.name{font:600 .82rem/1.3 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.name span{float:right;font-weight:400;color:var(--quiet);margin-left:8px}
.chart{display:block;width:100%;height:auto;font-family:inherit}
.chart *{stroke-linejoin:round}
.scroll{overflow:auto;max-height:420px}
table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{padding:5px 12px 5px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--quiet);font-weight:600;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
pre{font:.82rem/1.45 ui-monospace,Menlo,Consolas,monospace;overflow:auto;background:var(--ground);
  border:1px solid var(--line);border-radius:8px;padding:12px;margin:6px 0}
code{font:.88em ui-monospace,Menlo,Consolas,monospace}
figure{margin:0}
.media{display:flex;flex-wrap:wrap;gap:16px;margin:8px 0;align-items:center}
.media>*{flex:1 1 300px;min-width:0}
.media figure{max-width:500px}
.media .chart{max-width:640px}
figcaption{color:var(--quiet);font-size:.84rem}
video,.media img{max-width:100%;max-height:440px;border-radius:8px;background:#fff;display:block}
img.wide{width:100%;height:auto;border-radius:8px;background:#fff;padding:4px}
.narrow{display:none}
@media(max-width:600px){
  .narrow{display:block}
  .broad{display:none}
  main{padding:16px 10px 40px}
  section,details.card{padding:14px 12px}
  h1{font-size:1.4rem}
  .wide-scroll{overflow-x:auto}
  .wide-scroll img.wide{width:auto;max-width:none;height:auto;max-height:560px}
}
"""
