"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NARROW = 560;
  const charts = JSON.parse(document.getElementById("charts").textContent);

  function make(parent, name, attributes = {}, text) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function draw(parent, name, attributes = {}, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  const superscript = (n) => String(n).replace(/./g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);

  function format(value, digits = 3) {
    if (value === null || value === undefined) return "–";
    if (value === Infinity) return "failed";
    if (value === 0) return "0";
    const [mantissa, exponent] = Math.abs(value).toExponential(digits - 1).split("e");
    const sign = value < 0 ? "−" : "";
    if (exponent < -3 || exponent > 5) return `${sign}${mantissa}×10${superscript(Number(exponent))}`;
    const places = Math.max(0, digits - 1 - exponent);
    return sign + Math.abs(value).toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  }

  // Tick labels need no trailing zeros, and are all of one kind.
  function tick(value, scientific = false) {
    if (value === 0) return "0";
    const [mantissa, exponent] = value.toExponential(3).split("e");
    if (!scientific && exponent >= -3 && exponent <= 5) return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 8 });
    const factor = Number(mantissa);
    return (factor === 1 ? "" : `${factor}×`) + `10${superscript(Number(exponent))}`;
  }

  // "inf" stands for what a failed seed has from its failure on, null for what was never recorded.
  const decode = (values) => values.map((value) => (value === "inf" ? Infinity : value));

  function prepare(chart) {
    for (const view of chart.views) {
      for (const series of view.series) {
        for (const key of ["low", "median", "high"]) series[key] = decode(series[key]);
        for (const seed of series.seeds) seed.y = decode(seed.y);
      }
    }
  }

  const usable = (value, log) => Number.isFinite(value) && value !== null && (!log || value > 0);

  function linearTicks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) || 10);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + step * 1e-9; k += 1) ticks.push(k * step);
    return ticks;
  }

  function logTicks(low, high, count) {
    const decades = [];
    for (let e = Math.floor(low) - 1; e <= Math.ceil(high) + 1; e += 1) decades.push(e);
    const inside = decades.filter((e) => e >= low && e <= high);
    if (inside.length > 2) {
      const every = Math.max(1, Math.ceil(inside.length / count));
      return inside.filter((e) => e % every === 0).map((e) => 10 ** e);
    }
    const some = (factors) => decades.flatMap((e) => factors.map((factor) => factor * 10 ** e))
      .filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
    const coarse = some([1, 2, 5]);
    return coarse.length > 2 ? coarse : linearTicks(10 ** low, 10 ** high, count);
  }

  class Chart {
    constructor(figure, chart, number) {
      this.figure = figure;
      this.chart = chart;
      this.number = number;
      this.view = 0;
      this.log = chart.log;
      this.seeds = false;
      this.hidden = new Set();
      this.hovered = null;
      this.at = null;
      prepare(chart);
      this.buildTools();
      this.plot = make(figure, "div", { class: "plot" });
      this.svg = draw(this.plot, "svg", { tabindex: "0", role: "application", "aria-roledescription": "interactive chart" });
      this.tip = make(this.plot, "div", { class: "tip", hidden: "" });
      this.spoken = make(figure, "p", { class: "unseen", "aria-live": "polite" });
      this.legend = make(figure, "div", { class: "legend", role: "group", "aria-label": "Models shown" });
      if (chart.note) make(figure, "p", { class: "notes" }, chart.note);
      this.buildLegend();
      this.listen();
      new ResizeObserver(() => this.render()).observe(this.plot);
      this.render();
    }

    get shown() { return this.chart.views[this.view]; }
    get visible() { return this.shown.series.filter((series) => !this.hidden.has(series.label)); }

    buildTools() {
      const tools = make(this.figure, "div", { class: "tools", role: "group", "aria-label": `Options of ${this.chart.title}` });
      this.viewButtons = this.chart.views.length < 2 ? [] : this.chart.views.map((view, index) =>
        this.button(tools, view.name, () => { this.view = index; this.at = null; this.buildLegend(); }, () => this.view === index));
      this.logButton = this.button(tools, "Logarithmic", () => { this.log = !this.log; }, () => this.log);
      this.seedButton = this.button(tools, "Every seed", () => { this.seeds = !this.seeds; }, () => this.seeds);
    }

    button(parent, text, action, pressed) {
      const button = make(parent, "button", { type: "button" }, text);
      button.refresh = () => button.setAttribute("aria-pressed", String(pressed()));
      button.refresh();
      button.addEventListener("click", () => { action(); this.render(); });
      return button;
    }

    buildLegend() {
      const labels = [...new Set(this.shown.series.map((series) => series.label))];
      this.legend.replaceChildren();
      this.legendButtons = labels.map((label) => {
        const series = this.shown.series.find((one) => one.label === label);
        const button = this.button(this.legend, "", () => this.toggle(label), () => !this.hidden.has(label));
        const swatch = draw(button, "svg", { class: "swatch", "aria-hidden": "true", viewBox: "0 0 22 10" });
        draw(swatch, "line", { x1: 1, x2: 21, y1: 5, y2: 5, class: `c${series.colour}`, "stroke-width": 2.5, "stroke-dasharray": series.dash });
        make(button, "span", {}, label);
        const hover = (on) => () => { this.hovered = on ? label : null; this.render(); };
        button.addEventListener("pointerenter", hover(true));
        button.addEventListener("pointerleave", hover(false));
        button.addEventListener("focus", () => { if (button.matches(":focus-visible")) hover(true)(); });
        button.addEventListener("blur", hover(false));
        return button;
      });
    }

    toggle(label) {
      if (!this.hidden.delete(label)) this.hidden.add(label);
    }

    listen() {
      this.svg.addEventListener("pointermove", (event) => {
        const box = this.svg.getBoundingClientRect();
        this.moveTo(event.clientX - box.left, event.clientY - box.top);
      });
      this.svg.addEventListener("pointerleave", () => { this.at = null; this.drawCursor(); });
      this.svg.addEventListener("blur", () => { this.at = null; this.drawCursor(); });
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    points() {
      return [...new Set(this.visible.flatMap((series) => series.x))].sort((a, b) => a - b);
    }

    moveTo(px, py) {
      const points = this.points();
      if (!points.length || px < this.left - 12 || px > this.right + 12) { this.at = null; this.drawCursor(); return; }
      const wanted = this.x0 + ((px - this.left) / (this.right - this.left)) * (this.x1 - this.x0);
      this.at = points.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best));
      this.pointerY = py;
      this.drawCursor();
    }

    key(event) {
      const points = this.points();
      const now = this.at === null ? -1 : points.indexOf(this.at);
      const far = Math.max(1, Math.round(points.length / 20));
      const next = { ArrowRight: now + (event.shiftKey ? far : 1), ArrowLeft: now < 0 ? points.length - 1 : now - (event.shiftKey ? far : 1), Home: 0, End: points.length - 1 }[event.key];
      if (event.key === "Escape") { this.at = null; this.drawCursor(); return; }
      if (next === undefined || !points.length) return;
      event.preventDefault();
      this.at = points[Math.min(points.length - 1, Math.max(0, next))];
      this.pointerY = null;
      this.drawCursor();
      this.spoken.textContent = this.rows().map((row) => row.join(" ")).join("; ");
    }

    range() {
      const values = [];
      for (const series of this.visible) {
        values.push(...series.median, ...series.low, ...series.high);
        if (this.seeds || this.hovered === series.label) for (const seed of series.seeds) values.push(...seed.y);
      }
      const good = values.filter((value) => usable(value, this.log));
      for (const line of this.shown.lines) {
        if (usable(line.value, this.log) && this.isNear(line.value, good)) good.push(line.value);
      }
      if (!good.length) return this.log ? [-1, 0] : [0, 1];
      const scaled = this.log ? good.map(Math.log10) : good;
      // Spreading thousands of values over an argument list would overflow the stack.
      let low = scaled.reduce((a, b) => Math.min(a, b));
      let high = scaled.reduce((a, b) => Math.max(a, b));
      if (!this.log && low >= 0 && low < 0.6 * high) low = 0;
      if (high - low < 1e-9 * Math.max(1, Math.abs(high))) { low -= this.log ? 0.5 : Math.abs(low) * 0.1 || 0.5; high += this.log ? 0.5 : Math.abs(high) * 0.1 || 0.5; }
      const margin = (high - low) * 0.05;
      return [low === 0 && !this.log ? 0 : low - margin, high + margin];
    }

    // A line far away from all curves would flatten them.
    isNear(value, good) {
      if (!good.length) return true;
      const low = good.reduce((a, b) => Math.min(a, b));
      const high = good.reduce((a, b) => Math.max(a, b));
      return this.log ? value > low / 30 && value < high * 30 : value >= Math.min(0, low - (high - low)) && value < 2.5 * high;
    }

    render() {
      const width = Math.max(280, this.plot.clientWidth);
      const height = width < NARROW ? Math.max(230, width * 0.62) : Math.min(400, width * 0.42);
      for (const button of [...this.viewButtons, this.logButton, this.seedButton, ...this.legendButtons]) button.refresh();
      const svg = this.svg;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      svg.setAttribute("aria-label", `${this.chart.title}: ${this.chart.y} over ${this.chart.x}, ${this.visible.map((s) => s.label).join(", ")}. Arrow keys read values.`);
      [this.y0, this.y1] = this.range();
      const ticks = this.log ? logTicks(this.y0, this.y1, height / 45) : linearTicks(this.y0, this.y1, height / 55);
      const scientific = this.log && ticks.length > 1 && (ticks[0] < 1e-3 || ticks[ticks.length - 1] >= 1e6);
      const labels = ticks.map((value) => tick(value, scientific));
      this.left = 34 + 6.6 * Math.max(2, ...labels.map((label) => label.length));
      this.right = width - 26;
      this.top = 10;
      this.bottom = height - 44;
      const points = this.points();
      this.x0 = points.length ? points[0] : 0;
      this.x1 = points.length ? points[points.length - 1] : 1;
      if (this.x0 > 0 && this.x0 < 0.2 * this.x1) this.x0 = 0;
      if (this.x1 === this.x0) { this.x0 -= 0.5; this.x1 += 0.5; }
      this.drawAxes(ticks, labels);
      const clip = draw(draw(svg, "clipPath", { id: `clip${this.number}` }), "rect", { x: this.left, y: this.top - 2, width: this.right - this.left + 2, height: this.bottom - this.top + 4 });
      clip.parentNode.setAttribute("clipPathUnits", "userSpaceOnUse");
      const area = draw(svg, "g", { "clip-path": `url(#clip${this.number})` });
      for (const series of this.visible) this.drawBand(area, series);
      for (const series of this.visible) this.drawSeries(area, series);
      for (const line of this.shown.lines) this.drawReference(svg, line);
      if (!this.visible.length) draw(svg, "text", { x: (this.left + this.right) / 2, y: (this.top + this.bottom) / 2, "text-anchor": "middle" }, "No model is shown: choose one below");
      this.cursor = draw(svg, "g", { "pointer-events": "none" });
      this.drawCursor();
    }

    X(x) { return this.left + ((x - this.x0) / (this.x1 - this.x0)) * (this.right - this.left); }
    Y(y) {
      const scaled = this.log ? Math.log10(y) : y;
      return this.bottom - ((scaled - this.y0) / (this.y1 - this.y0)) * (this.bottom - this.top);
    }

    drawAxes(ticks, labels) {
      const svg = this.svg;
      ticks.forEach((value, index) => {
        const y = this.Y(value);
        draw(svg, "line", { x1: this.left, x2: this.right, y1: y, y2: y, class: "grid" });
        draw(svg, "text", { x: this.left - 7, y: y + 4, "text-anchor": "end" }, labels[index]);
      });
      for (const value of linearTicks(this.x0, this.x1, (this.right - this.left) / 95)) {
        const x = this.X(value);
        draw(svg, "line", { x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4, class: "frame" });
        draw(svg, "text", { x, y: this.bottom + 18, "text-anchor": "middle" }, tick(value));
      }
      draw(svg, "line", { x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom, class: "frame" });
      draw(svg, "text", { x: this.right, y: this.bottom + 36, "text-anchor": "end", class: "axis-title" }, this.chart.x);
      draw(svg, "text", { transform: `translate(13 ${this.top}) rotate(-90)`, "text-anchor": "end", class: "axis-title" }, this.chart.y);
    }

    path(x, y, close = false) {
      let path = "";
      let open = false;
      x.forEach((value, index) => {
        if (!usable(y[index], this.log)) { open = false; return; }
        path += `${open ? "L" : "M"}${this.X(value).toFixed(1)} ${this.Y(y[index]).toFixed(1)}`;
        open = true;
      });
      return path + (close ? "Z" : "");
    }

    faded(series) { return this.hovered !== null && this.hovered !== series.label ? " dimmed" : ""; }

    drawBand(area, series) {
      if (series.seeds.length < 2) return;
      const floor = this.log ? 10 ** (this.y0 - 1) : null;
      let run = [];
      const flush = () => {
        if (run.length > 1) {
          // Where the upper quartile is that of failed seeds, the band ends at the median; crosses mark the failures.
          const top = (k) => (Number.isFinite(series.high[k]) ? series.high[k] : series.median[k]);
          const up = run.map((k) => `${this.X(series.x[k]).toFixed(1)} ${this.Y(top(k)).toFixed(1)}`);
          const down = run.map((k) => `${this.X(series.x[k]).toFixed(1)} ${this.Y(this.log ? Math.max(series.low[k], floor) : series.low[k]).toFixed(1)}`).reverse();
          draw(area, "path", { d: `M${[...up, ...down].join("L")}Z`, class: `band f${series.colour}${this.faded(series)}` });
        }
        run = [];
      };
      series.x.forEach((_, k) => {
        if (series.low[k] !== null && Number.isFinite(series.median[k]) && usable(series.median[k], this.log)) run.push(k); else flush();
      });
      flush();
    }

    drawSeries(area, series) {
      const style = { "stroke-dasharray": series.dash };
      if (this.seeds || this.hovered === series.label) {
        for (const seed of series.seeds) {
          draw(area, "path", { d: this.path(series.x, seed.y), class: `seed c${series.colour}${this.faded(series)}`, "data-seed": `${series.label}\u0000${seed.seed}`, ...style });
          this.drawFailure(area, series, seed);
        }
      }
      draw(area, "path", { d: this.path(series.x, series.median), class: `median c${series.colour}${this.faded(series)}`, ...style });
      const only = series.x.length === 1 && usable(series.median[0], this.log);
      if (only) draw(area, "circle", { cx: this.X(series.x[0]), cy: this.Y(series.median[0]), r: 3.5, class: `f${series.colour}` });
      if (!this.seeds && this.hovered !== series.label) for (const seed of series.seeds) this.drawFailure(area, series, seed);
    }

    // A cross where a seed failed, also while its curve is not shown.
    drawFailure(area, series, seed) {
      const index = seed.y.indexOf(Infinity);
      const last = index > 0 ? index - 1 : seed.status === "failed" ? seed.y.findLastIndex((value) => value !== null) : -1;
      if (last < 0 || !usable(seed.y[last], this.log)) return;
      const x = this.X(series.x[last]);
      const y = Math.min(this.bottom - 5, Math.max(this.top + 5, this.Y(seed.y[last])));
      const cross = draw(area, "path", { d: `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x - 4} ${y + 4}L${x + 4} ${y - 4}`, class: `fail c${series.colour}${this.faded(series)}` });
      draw(cross, "title", {}, `${series.label}, seed ${seed.seed} failed`);
    }

    drawReference(svg, line) {
      if (!usable(line.value, this.log)) return;
      const y = this.Y(line.value);
      if (y < this.top - 1 || y > this.bottom + 1) return;
      draw(svg, "line", { x1: this.left, x2: this.right, y1: y, y2: y, class: "reference" });
      const above = y > this.top + 18;
      draw(svg, "text", { x: this.right - 4, y: above ? y - 5 : y + 14, "text-anchor": "end", class: "reference-label" }, `${line.label} ${format(line.value)}`);
    }

    rows() {
      const rows = [[`${this.chart.x} ${this.at.toLocaleString("en")}`]];
      for (const series of this.visible) {
        const k = series.x.indexOf(this.at);
        if (k < 0 || series.median[k] === null) continue;
        const name = series.label + (series.bound ? ", bound" : "");
        const band = series.n[k] > 1 ? `${format(series.low[k])} – ${format(series.high[k])}` : "";
        rows.push([name, format(series.median[k]), band, series.n[k] > 1 ? `${series.n[k]} seeds` : "1 seed"]);
      }
      return rows;
    }

    drawCursor() {
      if (!this.cursor) return;
      this.cursor.replaceChildren();
      this.svg.querySelectorAll(".near").forEach((path) => path.classList.remove("near"));
      this.tip.hidden = this.at === null;
      if (this.at === null) return;
      const x = this.X(this.at);
      draw(this.cursor, "line", { x1: x, x2: x, y1: this.top, y2: this.bottom, class: "cursor" });
      for (const series of this.visible) {
        const k = series.x.indexOf(this.at);
        if (k >= 0 && usable(series.median[k], this.log)) draw(this.cursor, "circle", { cx: x, cy: this.Y(series.median[k]), r: 3.2, class: `f${series.colour}` });
      }
      this.fillTip(this.seeds ? this.nearestSeed() : null);
      const box = this.tip.getBoundingClientRect().width;
      this.tip.style.left = `${x + 14 + box < this.right ? x + 14 : Math.max(0, x - 14 - box)}px`;
    }

    fillTip(near) {
      const [head, ...rows] = this.rows();
      this.tip.replaceChildren();
      make(this.tip, "div", { class: "head" }, head[0]);
      const body = make(make(this.tip, "table"), "tbody");
      const colours = this.visible.filter((series) => series.x.includes(this.at) && series.median[series.x.indexOf(this.at)] !== null);
      rows.forEach((row, index) => {
        const line = make(body, "tr");
        const swatch = draw(make(line, "td"), "svg", { class: "swatch", viewBox: "0 0 22 10" });
        draw(swatch, "line", { x1: 1, x2: 21, y1: 5, y2: 5, class: `c${colours[index].colour}`, "stroke-width": 2.5, "stroke-dasharray": colours[index].dash });
        make(line, "th", { scope: "row" }, row[0]);
        for (const cell of row.slice(1)) make(line, "td", {}, cell);
      });
      if (near) make(this.tip, "div", {}, `Nearest: ${near.label}, seed ${near.seed} (${near.status}): ${format(near.value)}`);
    }

    nearestSeed() {
      if (this.pointerY === null || this.pointerY === undefined) return null;
      let best = null;
      for (const series of this.visible) {
        const k = series.x.indexOf(this.at);
        for (const seed of k < 0 ? [] : series.seeds) {
          const away = usable(seed.y[k], this.log) ? Math.abs(this.Y(seed.y[k]) - this.pointerY) : Infinity;
          if (away < 40 && (!best || away < best.away)) best = { away, label: series.label, seed: seed.seed, status: seed.status, value: seed.y[k] };
        }
      }
      if (best) this.svg.querySelectorAll(".seed").forEach((path) => path.classList.toggle("near", path.dataset.seed === `${best.label}\u0000${best.seed}`));
      return best;
    }
  }

  document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    const number = Number(figure.dataset.chart);
    new Chart(figure, charts[number], number);
  });
  document.documentElement.dataset.ready = "true";
})();
