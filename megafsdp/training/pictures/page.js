// Draw the charts of the page, and redraw them when a switch changes. Numbers and specifications come
// from Python; here they get the chosen axis, and rows in place of columns.
"use strict";
(function () {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const state = { axis: "step", log: false, hidden: new Set(), views: {} };
  // How many drawings were asked for, and the one under way.
  let numAsked = 0, drawing = Promise.resolve();
  const axes = {
    step: { field: "step", title: "step", label: "format(datum.value, ',')" },
    tokens: { field: "tokens", title: "tokens", label: "format(datum.value, '~s')" },
    time: { field: "elapsed", title: "time (" + page.time_unit + ")", label: "format(datum.value, '~g')" },
  };
  const config = {
    background: "transparent",
    font: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    view: { stroke: "var(--line)" },
    axis: {
      labelColor: "var(--soft)", titleColor: "var(--soft)", gridColor: "var(--grid)", domainColor: "var(--line)",
      tickColor: "var(--line)", titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11.5, labelOverlap: true,
    },
    axisY: { minExtent: 44, tickCount: 5 },
    axisX: { tickCount: { expr: "max(3, floor(width / 90))" } },
    text: { fill: "var(--ink)" },
    legend: { labelColor: "var(--ink)", titleColor: "var(--soft)" },
    rule: { stroke: "var(--soft)" },
  };

  function clock(seconds) {
    if (seconds === null || seconds === undefined) return null;
    const all = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    const rest = pad(Math.floor(all / 60) % 60) + ":" + pad(all % 60);
    return all >= 3600 ? Math.floor(all / 3600) + ":" + rest : rest;
  }

  function rows(columns) {
    const names = Object.keys(columns), found = [];
    for (let i = 0; names.length && i < columns[names[0]].length; i++) {
      const row = {};
      for (const name of names) row[name] = columns[name][i];
      if ("elapsed_s" in row) {
        row.clock = clock(row.elapsed_s);
        row.elapsed = row.elapsed_s === null ? null : row.elapsed_s / page.time_unit_s;
      }
      if (!state.hidden.has(row.run)) found.push(row);
    }
    return found;
  }

  function fill(node, words) {
    if (typeof node === "string") {
      return node in words ? words[node] : node.replaceAll("'@x'", "'" + words["@x"] + "'");
    }
    if (Array.isArray(node)) return node.map((each) => fill(each, words));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, fill(value, words)]));
  }

  // All charts share the horizontal axis, so that they show the same moment at the same place.
  function domain(field) {
    let most = 0;
    for (const chart of page.charts) {
      for (const row of [chart.data.curves, chart.data.marks].flatMap((each) => rows(each ?? {}))) {
        most = Math.max(most, row[field] ?? 0);
      }
    }
    return [0, most || 1];
  }

  function removeView(key) {
    if (state.views[key]) state.views[key].finalize();
    delete state.views[key];
  }

  async function draw(chart) {
    const axis = axes[state.axis];
    const place = document.getElementById("chart-" + chart.key);
    const data = Object.fromEntries(Object.entries(chart.data).map(([name, c]) => [name, rows(c)]));
    if (data.curves && !data.curves.some((row) => row.value !== null && (row[axis.field] ?? null) !== null)) {
      removeView(chart.key);
      place.replaceChildren(document.createTextNode("Nothing to draw over " + axis.title + "."));
      return;
    }
    const spec = fill(chart.spec, {
      "@x": axis.field, "@x_title": axis.title, "@x_label": axis.label, "@x_domain": domain(axis.field),
      "@y_scale": state.log ? "log" : "linear", "@y_nice": !state.log,
      // Vega-Lite warns if a logarithmic axis says anything about 0.
      "@y_zero": state.log ? undefined : true, "@no": state.log ? undefined : false,
    });
    spec.datasets = data;
    const result = await vegaEmbed(place, spec, {
      renderer: "svg", actions: false, config: config,
      tooltip: { disableDefaultStyle: true },
    });
    removeView(chart.key);
    state.views[chart.key] = result.view;
  }

  // Drawings run one after the other: of two in one place, the older one could remain.
  function drawAll() {
    const number = ++numAsked;
    document.body.dataset.drawn = "";
    const next = async function () {
      if (number !== numAsked) return;
      await Promise.all(page.charts.map(draw));
      if (number === numAsked) document.body.dataset.drawn = state.axis + (state.log ? " log" : "");
    };
    drawing = drawing.then(next, next);
  }

  function press(group, button) {
    for (const each of group) each.setAttribute("aria-pressed", String(each === button));
  }

  function connect(name, act) {
    const group = document.querySelectorAll("button[data-" + name + "]");
    for (const button of group) {
      button.addEventListener("click", function () {
        press(group, button);
        act(button.dataset[name]);
      });
    }
  }

  connect("axis", function (axis) { state.axis = axis; drawAll(); });
  connect("scale", function (scale) { state.log = scale === "log"; drawAll(); });
  connect("theme", function (theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  });
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", function () {
      const run = button.dataset.run, isHidden = !state.hidden.delete(run);
      if (isHidden) state.hidden.add(run);
      button.setAttribute("aria-pressed", String(!isHidden));
      drawAll();
    });
  }
  // Paper is light; colours are variables, so nothing is drawn anew.
  let onScreen = null;
  window.addEventListener("beforeprint", function () {
    if (onScreen !== null) return;
    onScreen = { theme: document.documentElement.dataset.theme };
    document.documentElement.dataset.theme = "light";
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
  window.addEventListener("afterprint", function () {
    if (onScreen === null) return;
    if (onScreen.theme === undefined) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = onScreen.theme;
    onScreen = null;
  });
  // To look at the numbers behind a chart: megafsdpPage.views.loss.data("curves").
  window.megafsdpPage = { state: state, views: state.views };
  drawAll();
})();
