"use strict";
// Draws the plots and fills and searches the table of prompts.
(() => {
  const A_PAGE = 25;          // rows of the table at first, and again with every "more"
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const columns = ["", "prompt", "pass rate", "", "visits", "streak", "tokens"];
  const order = { column: 4, down: true };
  let data, views = [], turns = 0, shown = A_PAGE;

  const byId = (id) => document.getElementById(id);

  // -- plots ----------------------------------------------------------------------------------------------------------

  async function draw() {
    const turn = ++turns;  // a newer drawing ends an older one
    views.forEach((view) => view.finalize());
    views = [];
    // legends are the page's own, so that they look the same beside every plot; PNGs have Vega's
    const theme = data.config[dark.matches ? "dark" : "light"];
    const config = { ...theme, legend: { ...theme.legend, disable: true } };
    // ast: expressions are interpreted, so the page's policy need not allow eval
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, config };
    for (const element of document.querySelectorAll(".plot")) {
      if (element.closest("details:not([open])")) continue;  // it has no width until it is unfolded
      const spec = { ...data.plots[element.dataset.plot], autosize: { type: "fit-x", contains: "padding", resize: true } };
      const view = await vegaEmbed(element, spec, options);
      if (turn !== turns) return view.finalize();
      views.push(view);
    }
    document.documentElement.dataset.drawn = String(views.length);
  }

  // -- the table of prompts -------------------------------------------------------------------------------------------

  function matching() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = data.prompts.filter((row) => {
      const text = (row[1] + " " + data.runs[row[0]].name).toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const sign = order.down ? -1 : 1;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return rows.sort((a, b) => sign * compare(a[order.column], b[order.column]));
  }

  function cell(row, column) {
    const td = document.createElement("td");
    if (column === 1) {
      if (data.runs.length > 1) td.append(dot(data.runs[row[0]]));
      td.append(String(row[1]));  // text, whatever it holds
      return td;
    }
    td.dataset.label = columns[column];
    const value = document.createElement("span");
    value.textContent = column === 2 ? row[2].toFixed(2) : row[column].toLocaleString("en");
    if (column === 2) {
      const spread = document.createElement("span");
      spread.className = "spread";
      spread.textContent = " ± " + row[3].toFixed(2);
      value.append(spread);
    }
    td.append(value);
    return td;
  }

  function dot(run) {
    const mark = document.createElement("i");
    mark.style.background = run.colour;
    mark.title = run.name;
    return mark;
  }

  function fill() {
    const table = byId("beliefs");
    if (!table) return;
    const rows = matching();
    table.tBodies[0].replaceChildren(...rows.slice(0, shown).map((row) => {
      const tr = document.createElement("tr");
      tr.append(...[1, 2, 4, 5, 6].map((column) => cell(row, column)));
      return tr;
    }));
    const count = (number) => number.toLocaleString("en");
    byId("found").textContent = `${count(rows.length)} of ${count(data.prompts.length)} prompts`;
    byId("more").hidden = rows.length <= shown;
    byId("more").textContent = `Show ${count(Math.min(A_PAGE, rows.length - shown))} more`;
    for (const th of table.tHead.rows[0].cells) {
      const sorted = Number(th.dataset.column) === order.column;
      th.setAttribute("aria-sort", sorted ? (order.down ? "descending" : "ascending") : "none");
    }
  }

  function listen() {
    for (const fold of document.querySelectorAll(".fold")) fold.addEventListener("toggle", draw);
    const table = byId("beliefs");
    if (!table) return;
    byId("search").addEventListener("input", () => { shown = A_PAGE; fill(); });
    byId("more").addEventListener("click", () => { shown += A_PAGE; fill(); });
    for (const th of table.tHead.rows[0].cells) {
      th.querySelector("button").addEventListener("click", () => {
        const column = Number(th.dataset.column);
        order.down = column === order.column ? !order.down : column !== 1;
        order.column = column;
        fill();
      });
    }
  }

  function main() {
    data = JSON.parse(byId("data").textContent);
    listen();
    fill();
    draw();
    dark.addEventListener("change", draw);
  }

  main();
})();
