#include "report/style.h"

namespace sinkhorn::report {
namespace {

// Eight colours that stay apart for colour-blind readers (after Okabe and Ito), deep enough for
// paper, light enough for the dark.
constexpr const char* kLight =
    "  --paper: #fcfcfa; --raised: #f3f3ef; --ink: #1d2025; --quiet: #646a72; --rule: #e2e2dc;\n"
    "  --link: #1a5fa0; --best: #e4efe2; --mark: #fbe3b4; --wrong: #b23c17; --right: #18705a;\n"
    "  --s0: #0068a8; --s1: #c94f00; --s2: #00866a; --s3: #a63d83;\n"
    "  --s4: #8a6400; --s5: #4b9fd6; --s6: #4c4f55; --s7: #d98a7c;\n";
constexpr const char* kDark =
    "  --paper: #15171b; --raised: #1e2126; --ink: #e4e5e8; --quiet: #9ba1aa; --rule: #2d3138;\n"
    "  --link: #8cc2f0; --best: #22362b; --mark: #5c4613; --wrong: #f09272; --right: #74cdb2;\n"
    "  --s0: #5ab4ee; --s1: #f58a4b; --s2: #3fc7a0; --s3: #e08cc4;\n"
    "  --s4: #e6c04f; --s5: #2f7fb8; --s6: #c3c6cc; --s7: #b0594b;\n";

constexpr const char* kPage = R"css(
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0 auto; max-width: 66rem; padding: 3rem 1.5rem 6rem; background: var(--paper);
  color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
header { border-bottom: 1px solid var(--rule); padding-bottom: 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.25; font-weight: 650; letter-spacing: -.015em; margin: 0; }
h2 { font-size: 1.35rem; font-weight: 620; letter-spacing: -.01em; margin: 0 0 .75rem; }
h3 { font-size: 1.02rem; font-weight: 620; margin: 2rem 0 .35rem; }
h4 { font-size: .88rem; font-weight: 600; margin: 1.75rem 0 .6rem; color: var(--quiet); }
p { margin: 0 0 1rem; max-width: 46rem; }
a { color: var(--link); text-underline-offset: .2em; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.4rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
section { margin-top: 4rem; }
.quiet { color: var(--quiet); font-weight: 400; }
p.quiet { font-size: .9rem; }
#theme { float: right; border: 0; background: none; color: var(--quiet); font-size: 1.5rem;
  line-height: 1; cursor: pointer; padding: .4rem; }
aside { margin-top: 2rem; padding: 1rem 1.25rem; background: var(--raised);
  border-left: 3px solid var(--wrong); border-radius: 4px; font-size: .9rem; }
aside h2 { font-size: 1rem; margin: 0 0 .25rem; }
aside ul { margin: 0; padding-left: 1.1rem; }

.wide { overflow-x: auto; margin: 1rem 0 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.wide > table { min-width: 100%; }
.wide > table.results { min-width: 0; }
th, td { padding: .5rem 1.1rem .5rem 0; text-align: left; vertical-align: baseline;
  border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
th:last-child, td:last-child { padding-right: .25rem; }
thead th { font-weight: 500; color: var(--quiet); font-size: .82rem; vertical-align: bottom; }
tbody th { font-weight: 500; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
thead th.number { white-space: normal; }
.results thead th.number { padding-right: 1.1rem; }
tbody tr:last-child > * { border-bottom: 0; }

table.results .group { text-align: center; border-bottom: 0; padding-bottom: 0; color: var(--ink); }
table.results .ours { padding-left: 1.3rem; padding-right: .7rem; }
table.results .ours + td { padding-left: .7rem; }
table.results .best { background: var(--best); border-radius: 4px; font-weight: 650; }
table.results .leaks { color: var(--quiet); font-style: italic; }
.tag { font-size: .75rem; color: var(--quiet); border: 1px solid var(--rule); border-radius: 9px;
  padding: 0 .5rem; margin-left: .5rem; white-space: nowrap; font-weight: 400; font-style: normal; }
.tag.future { color: var(--wrong); border-color: var(--wrong); }
.notes { font-size: .82rem; color: var(--quiet); padding-left: 1.4rem; max-width: 46rem; }
sup { font-size: .68em; color: var(--quiet); margin-left: .15em; }
.costs { margin-top: .9rem; font-size: .85rem; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr));
  gap: 1.5rem 2rem; margin: 1rem 0 .5rem; }
figure { margin: 0; }
.chart { max-width: 31rem; }
.chart figcaption { font-size: .9rem; margin-bottom: .25rem; }
.chart svg { display: block; width: 100%; height: auto; overflow: visible; }
.grid line { stroke: var(--rule); }
.axis line { stroke: var(--quiet); }
.ticks text { fill: var(--quiet); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.ticks .end { text-anchor: end; }
.ticks .middle { text-anchor: middle; }
.line path { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.line circle { fill: currentColor; opacity: 0; }
.line circle:hover { opacity: 1; }
.line:hover path { stroke-width: 3.5; }
.d1 path { stroke-dasharray: 6 4; }
.d2 path { stroke-dasharray: 2 4; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); }
.s3 { color: var(--s3); } .s4 { color: var(--s4); } .s5 { color: var(--s5); }
.s6 { color: var(--s6); } .s7 { color: var(--s7); }
.swatch { width: 26px; height: 10px; margin-right: .6rem; vertical-align: baseline; }

.bar { white-space: nowrap; }
.track { display: inline-block; width: 9rem; height: .62rem; margin-right: .7rem;
  background: var(--raised); border-radius: 3px; overflow: hidden; }
.track span { display: block; height: 100%; background: var(--s0); }
td.bar:nth-of-type(2) .track span { background: var(--s4); }

details.run { border-top: 1px solid var(--rule); padding: .8rem 0; margin-top: 1.2rem; }
details.run + details.run { margin-top: 0; }
h3 + details.run { margin-top: .8rem; }
summary { cursor: pointer; }
details.run > summary { font-weight: 600; }
details details summary { font-size: .85rem; color: var(--quiet); margin-top: .75rem; }
.input { font-size: .88rem; margin: .8rem 0 0; font-variant-numeric: tabular-nums; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 1.5rem; }
.map { display: block; width: 100%; max-width: 12rem; height: auto; border-radius: 3px; }
.map image, .key img, .pixels { image-rendering: pixelated; }
.map rect { fill: #fff; opacity: 0; }
.map rect:hover { opacity: .18; }
.maps figcaption { font-size: .8rem; line-height: 1.5; margin-top: .45rem; color: var(--quiet);
  font-variant-numeric: tabular-nums; }
.maps figcaption b { color: var(--ink); font-weight: 600; }
.maps figcaption b, .maps figcaption span { display: block; }
.sources td, .sources th { font-size: .82rem; padding-top: .25rem; padding-bottom: .25rem;
  white-space: nowrap; }
.key { white-space: nowrap; }
.key img { width: 7rem; height: .75rem; border-radius: 2px; vertical-align: -.05rem; }

.sample { margin: 1rem 0 0; padding: 1rem 1.2rem; background: var(--raised); border-radius: 6px;
  display: grid; grid-template-columns: 9.5rem 1fr; gap: .5rem 1.2rem; font-size: .9rem; }
.sample dt { color: var(--quiet); font-size: .82rem; }
.sample dd { margin: 0; white-space: pre-wrap; font-variant-numeric: tabular-nums; }
mark { background: var(--mark); color: inherit; border-radius: 2px; padding: 0 .1em; }
.right { color: var(--right); }
.wrong { color: var(--wrong); }

@media (max-width: 40rem) {
  body { padding: 1.75rem 1.1rem 4rem; }
  h1 { font-size: 1.55rem; }
  section { margin-top: 3rem; }
  .sample { grid-template-columns: 1fr; gap: .1rem; }
  .sample dd { margin-bottom: .6rem; }
  .track { width: 3.5rem; }
  tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 7.8rem; }
  .tag { display: block; width: fit-content; margin: .15rem 0 0; }
}
@media print {
  #theme, nav { display: none; }
}
)css";

}  // namespace

std::string page_style() {
  return std::string(":root { color-scheme: light;\n") + kLight + "}\n" +
         "@media (prefers-color-scheme: dark) { :root { color-scheme: dark;\n" + kDark + "} }\n" +
         ":root[data-theme=light] { color-scheme: light;\n" + kLight + "}\n" +
         ":root[data-theme=dark] { color-scheme: dark;\n" + kDark + "}\n" + kPage;
}

std::string page_script() {
  return R"js(document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
                                  : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
)js";
}

}  // namespace sinkhorn::report
