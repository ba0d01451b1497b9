// Draws the charts of each report on the page that has none yet. Its data is in a block of JSON beside them.
// A server that serves the page sends changes: the event "changes" has new parts of the page, and a patch of the data.
(() => {
  "use strict";
  const MAX_TABLE_ROWS = 300;
  const TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800];
  const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  const number = (value) => {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e15) return Math.round(value).toLocaleString("en-US");
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  const duration = (s) => {
    if (s < 60) return `${+s.toPrecision(3)} s`;
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two((s / 60) % 60)}:${two(s % 60)}`;
  };
  const element = (parent, name, text, className) => {
    const made = parent.appendChild(document.createElement(name));
    if (text != null) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  function draw(root) {
    let data = JSON.parse(root.querySelector("script.data").textContent);
    const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
    let isMany = false;
    const zooms = new Map();  // by kind of figure: the part of x that the user has zoomed to
    // Of many ranks only those have a colour that a sentence at the top names.
    const colorOf = (rank) => {
      const place = isMany ? data.notable.indexOf(rank) : rank;
      return place >= 0 && place < 8 ? `c${place}` : "many";
    };
    const named = (line) => `rank ${line.rank}` + (line.attempt ? `, attempt ${line.attempt}` : "");

    // Lines of width 1 are drawn much faster than any other. What is drawn: lines of ranks, those of notable ones above the others, and thick ones above all.
    const linesOf = (curve) => {
      const size = parseFloat(getComputedStyle(root).fontSize);
      const isDense = isMany && curve.bins;  // colored lines would hide all others
      const lines = curve.lines.map((line) => ({ label: named(line), isLater: curve.lines.some((other) => other.rank === line.rank && other.attempt < line.attempt), y: line.y, color: isDense ? "many" : colorOf(line.rank), width: isMany ? 1 : 0.09 * size }));
      const others = lines.filter((line) => line.color === "many");
      const thick = Object.entries(curve.above).map(([label, y]) => ({ label, y, color: "text", width: 0.2 * size, isThick: true }));
      return [...others, ...lines.filter((line) => line.color !== "many"), ...thick];
    };

    function chart(figure, spec) {
      const kind = figure.className;
      const holder = figure.querySelector(".chart");
      const tip = element(holder, "div", "", "tip");
      let plot = null;
      let isBuilt = false;
      const build = () => {
        const pointer = plot?.cursor.left >= 0 ? { left: plot.cursor.left, top: plot.cursor.top } : null;
        plot?.destroy();
        isBuilt = false;
        const size = parseFloat(getComputedStyle(root).fontSize);
        const width = Math.max(200, holder.clientWidth);
        const height = Math.round(Math.min(Math.max(width * 0.42, 14 * size), 26 * size));
        const axis = {
          stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 },
          font: `${0.82 * size}px system-ui, sans-serif`, labelFont: `${0.82 * size}px system-ui, sans-serif`,
          labelSize: 1.5 * size, labelGap: 0.2 * size, gap: 0.3 * size,
        };
        const widest = Math.max(...spec.lines.flatMap((line) => [number(Math.min(...line.y.filter((y) => y != null))), number(Math.max(...line.y.filter((y) => y != null)))]).map((text) => text.length));
        plot = new uPlot({
          width, height, legend: { show: false }, padding: [0.6 * size, 1.6 * size, 0, 0],
          scales: { x: { time: false, range: spec.bars ? (u, low, high) => [low - 0.5, high + 0.5] : undefined }, y: spec.log ? { distr: 3 } : spec.fromZero ? { range: (u, low, high) => [0, 1.05 * high || 1] } : {} },
          axes: [
            { ...axis, size: 2.1 * size, label: spec.over, incrs: spec.over === "time" ? TIMES : WHOLE, space: 5 * size, values: (u, ticks) => ticks.map((x) => (spec.over === "time" ? duration(x) : number(x))) },
            { ...axis, size: Math.max(3, 0.55 * Math.max(5, widest) + 1) * size, values: (u, ticks) => ticks.map(number) },
          ],
          series: [{}, ...spec.lines.map((line) => ({
            label: line.label, stroke: color(line.color), width: line.width, spanGaps: true,
            fill: spec.bars ? color(line.color) : undefined, paths: spec.bars ? uPlot.paths.bars({ size: [0.8, 40] }) : undefined,
            points: { show: !spec.bars && spec.x.length < 3 },
          }))],
          focus: { alpha: spec.lines.length > 1 ? 0.35 : 1 },
          cursor: {
            focus: { prox: 2 * size }, drag: { x: true, y: false }, points: { show: false },
            dataIdx: (u, series, index) => nearest(u.data[series], index),
          },
          hooks: { setCursor: [() => tell(plot)], setSeries: [() => tell(plot)], setScale: [(u, name) => { if (isBuilt && name === "x") keepZoom(u); }] },
        }, [spec.x, ...spec.lines.map((line) => line.y)], holder);
        plot.focused = null;
        if (zooms.has(kind)) plot.setScale("x", zooms.get(kind));
        if (pointer) plot.setCursor(pointer);
        isBuilt = true;
      };
      const keepZoom = (u) => {
        const { min, max } = u.scales.x;
        if (min > spec.x[0] || max < spec.x[spec.x.length - 1]) zooms.set(kind, { min, max });
        else zooms.delete(kind);
      };
      const tell = (u) => {
        const { left, top, idx, idxs } = u?.cursor ?? {};
        if (idx == null || left < 0) { tip.style.display = "none"; return; }
        const shown = [];
        spec.lines.forEach((line, at) => {
          const y = line.y[idxs[at + 1]];
          if (y == null) return;
          shown.push({ text: `${line.label}: ${number(y)}${spec.unit ?? ""}`, far: Math.abs(u.valToPos(y, "y") - top), thick: line.isThick ?? 0 });
        });
        shown.sort((a, b) => b.thick - a.thick || a.far - b.far);
        const x = spec.over === "time" ? duration(spec.x[idx]) : `${spec.over} ${number(spec.x[idx])}`;
        tip.textContent = [x, ...shown.slice(0, 6).map((each) => each.text)].join("\n");
        tip.style.display = "block";
        const room = holder.clientWidth - tip.offsetWidth;
        const at = left + u.over.offsetLeft + 16;
        tip.style.left = `${Math.max(0, at < room ? at : at - tip.offsetWidth - 32)}px`;
        tip.style.top = `${Math.max(0, Math.min(top, holder.clientHeight - tip.offsetHeight))}px`;
      };
      const legend = figure.querySelector(".legend");
      legend.replaceChildren();
      const entries = spec.lines.filter((line) => line.color !== "many" && !line.isLater);
      entries.sort((a, b) => (b.isThick ?? 0) - (a.isThick ?? 0));
      const nOthers = spec.lines.filter((line) => line.color === "many" && !line.isLater).length;
      const others = entries.some((line) => line.color !== "text") ? "other replicas" : "replicas";
      for (const line of [...entries, ...(nOthers ? [{ label: `${others} (${nOthers})`, color: "many", width: 1.2 }] : [])]) {
        const item = element(legend, "li");
        const key = item.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
        const stroke = key.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
        key.setAttribute("aria-hidden", "true");
        stroke.setAttribute("d", "M0 6H20");
        stroke.style.stroke = `var(--${line.color})`;
        stroke.style.strokeWidth = spec.bars ? 10 : line.width + 0.8;
        item.append(line.label);
      }
      const table = figure.querySelector("details");
      const fill = () => table.open && tabulate(table.querySelector(".scroll"), spec);
      table.ontoggle = fill;
      fill();
      build();
      return { build, pointer: () => (plot.cursor.left >= 0 ? { left: plot.cursor.left, top: plot.cursor.top } : null), point: (at) => plot.setCursor(at), remove: () => { isBuilt = false; plot.destroy(); tip.remove(); } };
    }

    const nearest = (ys, index) => {
      for (let off = 0; off < 40; off++) {
        if (ys[index - off] != null) return index - off;
        if (ys[index + off] != null) return index + off;
      }
      return index;
    };

    function tabulate(holder, spec) {
      holder.replaceChildren();
      const every = Math.ceil(spec.x.length / MAX_TABLE_ROWS);
      if (every > 1) element(holder, "p", `One of ${every} rows is shown.`, "dim");
      const table = element(holder, "table");
      const head = element(element(table, "thead"), "tr");
      const lines = [...spec.lines].sort((a, b) => (b.isThick ?? 0) - (a.isThick ?? 0));
      for (const text of [spec.over, ...lines.map((line) => line.label)]) element(head, "th", text).scope = "col";
      const body = element(table, "tbody");
      for (let at = 0; at < spec.x.length; at += every) {
        const row = element(body, "tr");
        element(row, "th", spec.over === "time" ? duration(spec.x[at]) : number(spec.x[at])).scope = "row";
        for (const line of lines) element(row, "td", number(line.y[at]));
      }
    }

    let drawn = [];
    const show = (figure, make) => {
      let made = chart(figure, make());
      const again = () => { made.remove(); made = chart(figure, make()); };
      drawn.push({ figure, build: () => made.build(), remove: () => made.remove(), pointer: () => made.pointer(), point: (at) => made.point(at) });
      for (const control of figure.querySelectorAll("select, input")) control.onchange = again;
    };

    function drawAll() {
      const nRanks = new Set(data.curves.shown.flatMap((curve) => curve.lines.map((line) => line.rank))).size;
      isMany = Math.max(nRanks, data.rounds.norms.lines.length) > 8;
      const curves = root.querySelector("figure.curves");
      if (curves && data.curves.shown.length) {
        show(curves, () => {
          const curve = data.curves.shown[curves.querySelector("select")?.value ?? 0];
          const lines = linesOf(curve);
          const log = curves.querySelector("input");
          const isPositive = lines.every((line) => line.y.every((y) => y == null || y > 0));
          log.disabled = !isPositive;
          curves.querySelector(".thinned").textContent = curve.bins
            ? `Thinned: of each of ${curve.bins} bins every line keeps its least and its greatest value (${number(curve.points)} were kept).` : "";
          return { x: curve.x, lines, over: data.curves.over === "step" ? "step" : "time", log: log.checked && isPositive };
        });
      }
      const waited = root.querySelector("figure.waited");
      if (waited && data.rounds.waited.x.length) {
        const { x, lines, bins } = data.rounds.waited;
        const labels = lines.length > 1 ? ["the round took", "and training waited for"] : ["all replicas together"];
        show(waited, () => ({ x, lines: lines.map(({ y }, at) => ({ label: labels[at], y, color: at < lines.length - 1 ? "beside" : "waiting", width: 1 })), over: "round", unit: " s", bars: !bins, fromZero: true }));
      }
      const norms = root.querySelector("figure.norms");
      if (norms && data.rounds.norms.x.length) {
        show(norms, () => ({ x: data.rounds.norms.x, lines: linesOf(data.rounds.norms), over: "round", fromZero: true }));
      }

      const lanes = root.querySelector(".lanes");
      if (lanes) {
        const timeline = lanes.querySelector("svg.timeline");
        lanes.querySelector(".tip")?.remove();
        const tip = element(lanes, "div", "", "tip");
        timeline.onpointerleave = () => { tip.style.display = "none"; };
        timeline.onpointermove = (event) => {
          const box = timeline.getBoundingClientRect();
          const nLanes = data.timeline.lanes.length;
          const lane = data.timeline.lanes[Math.floor(((event.clientY - box.top) / lanes.querySelector("ol").clientHeight) * nLanes)];
          const s = ((event.clientX - box.left) / box.width) * data.timeline.end_s;
          const spans = lane ? lane.spans.filter(([, from, to]) => from <= s && s <= to) : [];
          tip.style.display = spans.length ? "block" : "none";
          if (!spans.length) return;
          const isBeside = ([kind]) => kind === "beside";
          const shown = [spans.find((span) => !isBeside(span)), spans.find(isBeside)].filter(Boolean);
          const lines = shown.map(([kind, from, to, rounds]) => `${rounds ? `${rounds}: ` : ""}${data.timeline.kinds[kind]} for ${duration(to - from)}`);
          tip.textContent = [`rank ${lane.rank} at ${duration(s)}`, ...lines].join("\n");
          const here = lanes.getBoundingClientRect();
          tip.style.left = `${Math.max(0, Math.min(event.clientX - here.left + 14, here.width - tip.offsetWidth))}px`;
          tip.style.top = `${event.clientY - here.top + 18}px`;
        };
      }
      root.dataset.drawn = drawn.length;
    }

    // What a patch says: "=" is a new value, "+" are values to append, "-" are keys to remove, and "." has a patch by key.
    const patched = (old, patch) => {
      if ("=" in patch) return patch["="];
      if ("+" in patch) { for (const value of patch["+"]) old.push(value); return old; }
      for (const key of patch["-"] ?? []) delete old[key];
      for (const [key, each] of Object.entries(patch["."] ?? {})) old[key] = patched(old[key], each);
      return old;
    };
    const controlsOf = (part) => [...part.querySelectorAll("select, input")];
    const open = "details, .scroll, pre";
    function replacePart(part, html) {
      const before = [...part.querySelectorAll(open)].map((each) => ({ open: each.open, top: each.scrollTop, left: each.scrollLeft }));
      const chosen = controlsOf(part).map((each) => (each.type === "checkbox" ? each.checked : each.selectedOptions[0]?.textContent));
      const focusable = "a, select, input, summary, [tabindex]";
      const focused = [...part.querySelectorAll(focusable)].indexOf(document.activeElement);
      part.innerHTML = html;
      part.querySelectorAll(open).forEach((each, at) => {
        if (!before[at]) return;
        if (each.localName === "details" && before[at].open != null) each.open = before[at].open;
        each.scrollTop = before[at].top;
        each.scrollLeft = before[at].left;
      });
      controlsOf(part).forEach((each, at) => {
        if (each.type === "checkbox") each.checked = chosen[at] === true;
        else { const found = [...each.options].findIndex((option) => option.textContent === chosen[at]); if (found >= 0) each.selectedIndex = found; }
      });
      if (focused >= 0) part.querySelectorAll(focusable)[focused]?.focus({ preventScroll: true });
    }
    root.addEventListener("changes", ({ detail: { parts, charts } }) => {
      const pointers = new Map(drawn.map((each) => [each.figure.className, each.pointer()]));
      if (charts) drawn.forEach((each) => each.remove());
      for (const [name, html] of Object.entries(parts)) {
        const part = root.querySelector(`.part[data-part="${CSS.escape(name)}"]`);
        if (part) replacePart(part, html);
      }
      if (!charts) return;
      data = patched(data, charts);
      drawn = [];
      drawAll();
      for (const each of drawn) if (pointers.get(each.figure.className)) each.point(pointers.get(each.figure.className));
    });

    drawAll();
    let width = root.clientWidth;
    const again = () => drawn.forEach((each) => each.build());
    new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; again(); } }).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  document.querySelectorAll(".replicas:not([data-drawn])").forEach(draw);
})();
