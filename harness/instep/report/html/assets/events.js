// Draws the heat map of layers and events, and the timeline of requests; a click shows details.
drawn("charts", (charts) => {
  const GAP = 0.06;            // part of an event's width that stays free between two cells
  const CELLS = 8000;          // cells that are drawn at most: beyond, neighbouring events share one
  const AROUND = 32;           // events that are seen before the end of a run that diverged
  const WORDS = { set_num_steps: "new step count" };
  const BLOCKS = ["prefill", "draft", "verify", "commit", "decode"];
  const SHAPES = {             // of marks that are no block, in a square from -1 to 1
    admit: [[[-1, -1], [1, 0], [-1, 1]]], resume: [[[-1, -1], [1, 0], [-1, 1], [-0.4, 0]]],
    preempt: [[[-0.9, -1], [-0.2, -1], [-0.2, 1], [-0.9, 1]], [[0.2, -1], [0.9, -1], [0.9, 1], [0.2, 1]]],
    finish: [[[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]]],
    abort: [[[-1, -0.6], [-0.6, -1], [0, -0.4], [0.6, -1], [1, -0.6], [0.4, 0], [1, 0.6], [0.6, 1], [0, 0.4], [-0.6, 1], [-1, 0.6], [-0.4, 0]]],
    save: [[[-0.35, -1], [0.35, -1], [0.35, 0], [0.9, 0], [0, 1], [-0.9, 0], [-0.35, 0]]],
    load: [[[-0.35, 1], [0.35, 1], [0.35, 0], [0.9, 0], [0, -1], [-0.9, 0], [-0.35, 0]]],
  };
  const total = data.events.length, kindOf = (event) => data.kinds[data.events[event]];
  // ---- the numbers of a run, from the compact arrays

  const part = (line) => (line.length === 3 ? null : line[8] === 0 && line[7] === 0 ? Infinity :
    typeof line[6] === "string" ? Infinity : line[7] > 0 ? line[6] / line[7] : 0);
  function opened(run) {
    if (run.cells) return run;
    const rows = run.rows.length;
    run.cells = new Map();
    run.used = new Float32Array(rows * total).fill(-1);  // -1: nothing was compared; -2: exact
    let at = 0;
    run.at.forEach((step, index) => {
      at += step;
      run.cells.set(at, run.of[index]);
      const parts = run.of[index].map((line) => part(run.lines[line])).filter((each) => each !== null);
      run.used[at] = parts.length ? Math.max(...parts) : -2;
    });
    run.missing = new Set(run.not_judged);
    run.found = new Map();
    run.wrong = new Map();     // event and request -> its first finding
    run.first = new Map();     // request -> the event of its first finding
    run.findings.forEach((one) => {
      const key = one.event * rows + one.row;
      run.found.set(key, [...(run.found.get(key) ?? []), one]);
      const request = data.requests.indexOf(one.request), mark = `${one.event} ${request}`;
      if (request >= 0 && !run.wrong.has(mark)) run.wrong.set(mark, one.says);
      if (request >= 0) run.first.set(request, Math.min(one.event, run.first.get(request) ?? one.event));
    });
    return run;
  }
  const marksAt = new Map();
  data.marks.forEach((mark) => marksAt.set(mark[0], [...(marksAt.get(mark[0]) ?? []), mark]));

  // ---- the marks for the visible events: one per cell, or one per bin of events and row

  function seenCells(run, from, to) {
    const rows = run.rows.length, width = Math.max(1, Math.ceil((to - from + 1) * rows / CELLS));
    const cells = [], exact = [], missing = [];
    for (let begin = from - (from % width); begin <= to; begin += width) {
      const end = Math.min(begin + width, total) - 1;
      for (let row = 0; row < rows; row++) {
        let most = -1, where = -1, lacks = -1;
        for (let event = begin; event <= end; event++) {
          const at = event * rows + row, used = run.used[at];
          if (run.missing.has(at) && lacks < 0) lacks = at;
          if (used > most || (used === -2 && most === -1)) { most = used === -2 && most >= 0 ? most : used; where = at; }
        }
        if (most >= 0) cells.push([begin, end, row, levelOf(most), where]);
        else if (most === -2) exact.push([begin, end, row, 0, where]);
        if (lacks >= 0) missing.push([begin, end, row, 0, lacks]);
      }
    }
    return { cells, exact, missing };
  }
  function seenMarks(from, to, room) {
    const shown = data.marks.filter((mark) => mark[1] >= 0 && mark[0] >= from && mark[0] <= to);
    const width = Math.max(1, Math.ceil((to - from + 1) / Math.max(room / 4, 1)));
    if (width === 1) return shown.map((mark) => [mark[0], mark[0], mark]);
    const bins = new Map(), rank = (mark) => BLOCKS.indexOf(mark[2]);  // what happens once goes before what repeats
    for (const mark of shown) {
      const bin = Math.floor(mark[0] / width), key = `${bin} ${data.lanes[mark[1]]}`, there = bins.get(key);
      if (!there || rank(mark) < rank(there[2])) bins.set(key, [bin * width, Math.min(bin * width + width, total) - 1, mark]);
    }
    return [...bins.values()];
  }

  // ---- the charts

  /** The rectangle of events and a row, cut to the chart. */
  function box(params, api, begin, end, row, high, gap = GAP) {
    const [left, middle] = api.coord([begin - 0.5 + gap / 2, row]), [right] = api.coord([end + 0.5 - gap / 2, row]);
    const shape = { x: left, y: middle - high / 2, width: Math.max(right - left, 1), height: high };
    return window.echarts.graphic.clipRectByRect(shape, params.coordSys);
  }
  const cell = (style) => (params, api) => {
    const high = api.size([0, 1])[1], wide = api.size([1, 0])[0];
    const shape = box(params, api, api.value(0), api.value(1), api.value(2), high - Math.min(2, high / 6), wide > 6 ? GAP : 0);
    return shape && { type: "rect", shape, style: style(api) };
  };
  const state = { run: 0, event: null, row: null, from: 0, to: total - 1 };
  const run = () => opened(data.runs[state.run]);
  let chart;

  function stays(params, api) {
    const [request, slot, begin, end] = data.stays[params.dataIndexInside ?? params.dataIndex] ?? data.stays[params.dataIndex];
    const lane = data.lanes[request], high = api.size([0, 1])[1];
    const shape = box(params, api, begin, end, lane, high - 4, 0);
    if (!shape) return null;
    const away = slot === -1, label = [data.requests[request], away ? "preempted" : slot < -1 ? "" : `slot ${slot}`].filter(Boolean).join("  ");
    return { type: "group", children: [
      { type: "rect", shape: { ...shape, r: 3 }, style: away ? { fill: "none", stroke: color("hatch"), lineDash: [4, 4] } : { fill: color("stay") } },
      { type: "text", silent: true, style: { text: label, x: shape.x + 4, y: shape.y + 2, fill: color("ink"), font: "12px sans-serif",
        width: shape.width - 6, overflow: shape.width > 24 ? "truncate" : "none", ...(shape.width <= 24 && { text: "" }) } },
    ] };
  }
  function mark(params, api) {
    const [begin, end, [, request, what, number, of, tree]] = state.marks[params.dataIndex];
    const lane = data.lanes[request], high = api.size([0, 1])[1], wide = api.size([1, 0])[0];
    const shape = box(params, api, begin, end, lane, high - 4);
    if (!shape) return null;
    shape.y += 17; shape.height -= 19;
    if (!BLOCKS.includes(what)) {
      const size = Math.min(6, Math.max(shape.width / 2, 2)), x = shape.x + shape.width / 2, y = shape.y + shape.height / 2;
      const pieces = (SHAPES[what] ?? SHAPES.finish).map((points) => ({ type: "polygon",
        shape: { points: points.map(([a, b]) => [x + a * size, y + b * size]) }, style: { fill: color("mark") } }));
      return { type: "group", children: [...pieces, { type: "rect", shape, style: { fill: "transparent" } }] };
    }
    const fill = color(what), share = what === "commit" && of > 0 ? number / of : 1, text = what === "commit" ? `+${number}` : `${number}`;
    const inner = { ...shape, y: shape.y + shape.height * (1 - share), height: shape.height * share };
    const children = [
      { type: "rect", shape, style: { fill, opacity: share < 1 ? 0.3 : 1 } },
      { type: "rect", shape: inner, style: { fill } },
    ];
    if (tree >= 0 && shape.width > 12) children.push({ type: "polyline", silent: true, style: { stroke: color(what === "commit" ? "ink" : "on"), fill: "none", lineWidth: 1.3 },
      shape: { points: [[shape.x + 2, shape.y + 7], [shape.x + 5, shape.y + 3], [shape.x + 8, shape.y + 7]] } });
    if (wide > 9 + 6 * text.length) children.push({ type: "text", silent: true, style: { text, x: shape.x + shape.width / 2, y: shape.y + shape.height / 2,
      align: "center", verticalAlign: "middle", font: "12px sans-serif",
      ...(share < 1 ? { fill: color("ink"), stroke: color("stay"), lineWidth: 2 } : { fill: color("on") }) } });
    const wrong = wrongIn(begin, end, request);
    if (wrong !== undefined) {
      children.push({ type: "rect", silent: true, shape, style: { fill: "none", stroke: color("bad"), lineWidth: 3 } });
      if (run().first.get(request) === wrong) {  // in words, into the free part of the lane above the block
        const { x, width } = params.coordSys, late = shape.x > x + width / 2, at = late ? shape.x + shape.width : shape.x;
        children.push({ type: "text", silent: true, style: { text: run().wrong.get(`${wrong} ${request}`), x: at, y: shape.y - 15, align: late ? "right" : "left", fill: color("bad"),
          font: "bold 12px sans-serif", width: (late ? at - x : x + width - at) - 24, overflow: "truncate", ellipsis: "…" } });
      }
    }
    return { type: "group", children };
  }
  function wrongIn(begin, end, request) {
    for (let event = begin; event <= end; event++) if (run().wrong.has(`${event} ${request}`)) return event;
    return undefined;
  }
  /** A line through all lanes where the step count changes, and the old and the new count. */
  function turn(params, api) {
    const [event, before, count] = [0, 1, 2].map((index) => api.value(index)), { x, y, width, height } = params.coordSys, [at] = api.coord([event, 0]);
    if (at < x || at > x + width) return null;
    return { type: "group", silent: true, children: [
      { type: "line", shape: { x1: at, y1: y - (params.seriesId === "switches" ? 0 : 14), x2: at, y2: y + height }, style: { stroke: color("mark"), lineWidth: 1, lineDash: [3, 3] } },
      ...(params.seriesId === "switched" ? [{ type: "text", style: { text: `${before} → ${count}`, x: at + (at > x + width - 50 ? -4 : 4), y: y + 15, align: at > x + width - 50 ? "right" : "left", fill: color("ink"), backgroundColor: color("ground"), font: "bold 12px sans-serif" } }] : []),
    ] };
  }

  function option(size) {
    const rows = run().rows, lanes = Math.max(...data.lanes, 0) + 1, ink = color("ink"), quiet = color("quiet"), line = color("line");
    const left = 12 + 7.2 * Math.min(26, Math.max(...rows.map((row) => row.length))), right = 18;
    const tops = [8, size.heat + 40, size.heat + 40 + size.lanes + 14], grid = { left, right };
    const axis = { type: "value", min: -0.5, max: total - 0.5, minInterval: 1, splitLine: { show: false }, axisTick: { show: false },
      axisLine: { show: true, onZero: false, lineStyle: { color: line } } };
    const said = { color: quiet, fontSize: 12, formatter: (event) => (Number.isInteger(event) && event >= 0 && event < total ? `${event}` : "") };
    const fixed = { animation: false, clip: true, encode: { x: [0, 1], y: 2 } };
    const most = Math.max(...data.steps.map(([, count]) => count), 1);
    const turned = data.steps.map(([event, count], index) => [event, data.steps[index - 1]?.[1], count]).filter(([, before, count]) => before !== undefined && before !== count);
    const through = { animation: false, type: "custom", data: turned, encode: { x: 0 }, clip: false, renderItem: turn, silent: true, z: 4 };
    return {
      animation: false, backgroundColor: "transparent", textStyle: { color: ink, fontFamily: "sans-serif" },
      grid: [{ ...grid, top: tops[0], height: size.heat }, { ...grid, top: tops[1], height: size.lanes }, { ...grid, top: tops[2], height: 44 }],
      xAxis: [
        { ...axis, gridIndex: 0, axisLabel: said, name: "event", nameLocation: "start", nameGap: 8, nameTextStyle: { color: quiet, fontSize: 12, verticalAlign: "top", padding: [7, 0, 0, 0] } },
        { ...axis, gridIndex: 1, axisLabel: { show: false } }, { ...axis, gridIndex: 2, axisLabel: said },
      ],
      yAxis: [
        { type: "category", gridIndex: 0, data: rows, inverse: true, axisTick: { show: false }, axisLine: { show: false }, axisLabel: { color: ink, fontSize: 12, width: left - 14, overflow: "truncate" } },
        { type: "category", gridIndex: 1, data: [...Array(lanes).keys()].map(String), inverse: true, show: false },
        { type: "value", gridIndex: 2, min: 0, max: most, interval: most, axisLine: { show: false }, axisTick: { show: false }, splitLine: { lineStyle: { color: line } }, axisLabel: { color: quiet, fontSize: 12 },
          name: "drafts a round", nameLocation: "middle", nameRotate: 0, nameGap: 30, nameTextStyle: { color: ink, fontSize: 12, align: "right" } },
      ],
      dataZoom: [
        { type: "inside", xAxisIndex: [0, 1, 2], zoomOnMouseWheel: "ctrl", filterMode: "none", minValueSpan: Math.min(4, total) },
        { type: "slider", xAxisIndex: [0, 1, 2], height: 20, bottom: 4, left, right, filterMode: "none", showDataShadow: false, minValueSpan: Math.min(4, total),
          labelFormatter: (value) => `${Math.round(Math.min(Math.max(value, 0), total - 1))}`, textStyle: { color: quiet }, borderColor: line },
      ],
      visualMap: levels(),
      tooltip: tip(hover),
      series: [
        { ...fixed, id: "cells", type: "custom", renderItem: cell((api) => ({ fill: api.visual("color") })) },
        { ...fixed, id: "exact", type: "custom", renderItem: cell(() => ({ fill: color("exact") })) },
        { ...fixed, id: "missing", type: "custom", renderItem: cell(() => ({ fill: hatch() })) },
        { ...fixed, id: "unserved", type: "custom", silent: true, data: run().served < total ? [[run().served, total - 1, 0]] : [], renderItem: unserved },
        { ...fixed, id: "found", type: "custom", z: 5, renderItem: outlined("bad-fill", "bad", 2) },
        { ...fixed, id: "chosen", type: "custom", z: 6, silent: true, renderItem: outlined(null, "ink", 3) },
        { ...fixed, id: "stays", type: "custom", xAxisIndex: 1, yAxisIndex: 1, data: data.stays.map((stay) => [stay[2], stay[3], data.lanes[stay[0]]]), renderItem: stays },
        { ...fixed, id: "marks", type: "custom", xAxisIndex: 1, yAxisIndex: 1, z: 3, renderItem: mark },
        { ...through, id: "switches", xAxisIndex: 1, yAxisIndex: 1 }, { ...through, id: "switched", xAxisIndex: 2, yAxisIndex: 2 },
        { id: "steps", type: "line", xAxisIndex: 2, yAxisIndex: 2, step: "end", symbol: "none", silent: true, lineStyle: { color: color("mark"), width: 2 },
          data: [...data.steps.map(([event, count], index) => [index ? event : -0.5, count]), [total - 0.5, data.steps.at(-1)[1]]] },
      ],
    };
  }
  function unserved(params, api) {
    const [left] = api.coord([api.value(0) - 0.5, 0]), { x, y, width, height } = params.coordSys, begin = Math.max(left, x);
    if (begin >= x + width) return null;
    const shape = { x: begin, y, width: x + width - begin, height };
    return { type: "group", children: [
      { type: "rect", shape, style: { fill: hatch(), opacity: 0.75 } },
      ...(shape.width > 70 ? [{ type: "text", style: { text: "not run", x: begin + shape.width / 2, y: y + height / 2, align: "center", verticalAlign: "middle",
        fill: color("ink"), backgroundColor: color("ground"), padding: [4, 8], borderRadius: 4, font: "13px sans-serif" } }] : []),
    ] };
  }
  const outlined = (fill, stroke, lineWidth) => (params, api) => {
    const high = api.size([0, 1])[1], shape = box(params, api, api.value(0), api.value(1), api.value(2), Math.max(high, 6), 0);
    if (!shape) return null;
    const grown = Math.max(0, 9 - shape.width) / 2;  // a finding is seen however many events there are
    return { type: "rect", shape: { x: shape.x - grown, y: shape.y, width: shape.width + 2 * grown, height: shape.height },
      style: { fill: fill ? color(fill) : "transparent", stroke: color(stroke), lineWidth } };
  };

  /** Draws anew what hangs on the zoom, the run, or the cell that was chosen. */
  function refresh() {
    const { cells, exact, missing } = seenCells(run(), state.from, state.to), rows = run().rows.length;
    const found = [...run().found.keys()].map((at) => [Math.floor(at / rows), Math.floor(at / rows), at % rows, 0, at]);
    state.marks = seenMarks(state.from, state.to, chart.getWidth());
    chart.setOption({ series: [
      { id: "cells", data: cells }, { id: "exact", data: exact }, { id: "missing", data: missing }, { id: "found", data: found },
      { id: "chosen", data: state.event === null || state.row === null ? [] : [[state.event, state.event, state.row]] },
      { id: "marks", data: state.marks.map(([begin, end, [, request]]) => [begin, end, data.lanes[request]]) },
    ] });
    Object.assign(root.dataset, { cells: cells.length, exact: exact.length, missing: missing.length, findings: found.length, marks: state.marks.length,
      events: `${state.from}-${state.to}`, run: run().name, wrong: run().wrong.size });
  }

  // ---- the details of a cell or an event

  function told([, request, what, count, of, tree]) {
    const name = request < 0 ? "" : `${data.requests[request]}: `, nodes = tree < 0 ? "" : ", a tree";
    const words = { prefill: `prefill of ${count} of ${of} tokens`, draft: `${count} drafts${nodes}`, verify: `verify of ${count} nodes${nodes}`,
      commit: `commit, ${count} of ${of} drafts accepted${nodes}`, admit: `admitted with ${count} tokens`, decode: "decode of 1 token" };
    return name + (words[what] ?? WORDS[what] ?? what);
  }
  const stepCount = (event) => data.steps.filter(([at]) => at <= event).at(-1)[1];
  function hover({ seriesId, dataIndex, value }) {
    const lines = [];
    if (seriesId === "marks") {
      const [begin, end, one] = state.marks[dataIndex];
      lines.push(begin === end ? `event ${begin} ${kindOf(begin)}` : `events ${begin} to ${end}, among them ${one[0]}`, told(one));
      const wrong = wrongIn(begin, end, one[1]);
      if (wrong !== undefined) lines.push(run().wrong.get(`${wrong} ${one[1]}`));
    } else if (["cells", "exact", "missing", "found"].includes(seriesId)) {
      const rows = run().rows.length, event = Math.floor(value[4] / rows), used = run().used[value[4]];
      lines.push(`event ${event} ${kindOf(event)}, ${run().rows[value[4] % rows]}` + (value[0] < value[1] ? ` (most of events ${value[0]} to ${value[1]})` : ""));
      lines.push(seriesId === "missing" ? "not judged" : used === -2 ? "exact" : `${number(used)} of the allowance used`);
      if (seriesId === "found") lines.push(run().found.get(value[4])[0].says);
    } else return "";
    return hint(lines);
  }
  function tree([parents, accepted]) {
    const depth = [], leaf = parents.map(() => true), children = parents.map(() => []);
    parents.forEach((parent, node) => { depth[node] = parent < 0 ? 0 : depth[parent] + 1; if (parent >= 0) { leaf[parent] = false; children[parent].push(node); } });
    const x = []; let next = 0;
    const place = (node) => { children[node].forEach(place); x[node] = leaf[node] ? next++ : children[node].reduce((sum, child) => sum + x[child], 0) / children[node].length; };
    place(0);
    const svg = (tag, attributes, text) => { const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value); if (text) made.textContent = text; return made; };
    const wide = 34 * next + 10, high = 32 * (Math.max(...depth) + 1) + 8, at = (node) => [22 + 34 * x[node], 18 + 32 * depth[node]];
    const made = svg("svg", { class: "tree", width: wide, height: high, role: "img", "aria-label": `tree of ${parents.length} nodes, accepted ${accepted.join(", ") || "none"}` });
    const kept = new Set([0, ...accepted]);
    parents.forEach((parent, node) => { if (parent < 0) return; const [a, b] = at(parent), [c, d] = at(node);
      made.append(svg("line", { x1: a, y1: b, x2: c, y2: d, stroke: color(kept.has(node) ? "commit" : "hatch"), "stroke-width": kept.has(node) ? 4 : 1.5 })); });
    parents.forEach((_, node) => { const [a, b] = at(node);
      made.append(svg("circle", { cx: a, cy: b, r: 11, fill: color(kept.has(node) && (node || accepted.length) ? "commit" : "prefill") }),
        svg("text", { x: a, y: b + 4, "text-anchor": "middle" }, String(node))); });
    return made;
  }
  function maps(one) {
    if (!one.maps) return null;
    const { head, shape, axes, found, expected, difference } = one.maps, finite = (rows) => rows.flat().filter((value) => typeof value === "number").map(Math.abs);
    const most = Math.max(...finite(found), ...finite(expected), 1e-300), apart = Math.max(...finite(difference), 1e-300), nulls = [0.55, 0.55, 0.55];
    const mix = (value, scale) => {  // from orange over the ground to blue; what is no number is grey
      if (typeof value !== "number") return nulls;
      const t = Math.sign(value) * Math.sqrt(Math.min(1, Math.abs(value) / scale)), dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const ends = dark ? [[0.51, 0.77, 0.97], [1, 0.58, 0.25]] : [[0.13, 0.44, 0.71], [0.84, 0.37, 0]], zero = dark ? [0.05, 0.07, 0.09] : [1, 1, 1];
      const end = ends[t > 0 ? 0 : 1], s = Math.abs(t);
      return zero.map((low, index) => low + (end[index] - low) * s);
    };
    const draw = (rows, name, scale) => {
      const canvas = el("canvas", { width: rows[0].length, height: rows.length, role: "img", "aria-label": name });
      const image = new ImageData(rows[0].length, rows.length);
      rows.forEach((row, y) => row.forEach((value, x) => image.data.set([...mix(value, scale).map((each) => Math.round(255 * each)), 255], 4 * (y * rows[0].length + x))));
      canvas.getContext("2d").putImageData(image, 0, 0);
      canvas.style.height = `${Math.min(220, Math.max(48, rows.length * 5))}px`;
      return el("figure", {}, canvas, el("figcaption", {}, `${name}, ±${number(scale)}`));
    };
    const what = `${head === null ? "" : `head ${head}: `}${shape[0]} (${axes[0]}, down) × ${shape[1]} (${axes[1]}, across)`;
    return el("div", {}, el("h4", {}, what), el("div", { class: "maps" }, draw(found, "found", most), draw(expected, "expected", most), draw(difference, "difference", apart)));
  }
  function lineTable(lines) {
    const body = lines.map((line) => {
      const [check, tier] = run().checks[line[0]], used = part(line);
      const at = line.length === 3 ? "" : [run().components[line[3]], line[4] < 0 ? "" : `"${data.requests[line[4]]}"`, line[5] < 0 ? "" : `slot ${line[5]}`].filter(Boolean).join(", ");
      const numbers = line.length === 3 ? ["", "", "exact"] : [number(line[6]), number(line[7]), Number.isFinite(used) ? number(used) : "over"];
      return el("tr", line[8] === 0 ? { class: "over" } : {}, ...[`${tier} ${check}`, `${line[1]}`, line[2].toLocaleString("en"), at, ...numbers].map((text) => el("td", {}, text)));
    });
    const heads = ["check", "compared", "numbers", "tightest at", "measured", "allowed", "part used"];
    return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)))), el("tbody", {}, ...body)));
  }
  function describe() {
    const panel = document.getElementById("panel"), { event, row } = state;
    if (event === null) { panel.replaceChildren(el("p", { class: "quiet" }, "Click a cell or an event to see its numbers here.")); return; }
    const rows = run().rows.length, at = row === null ? -1 : event * rows + row, served = event < run().served;
    const parts = [el("h3", {}, `event ${event} ${WORDS[kindOf(event)] ?? kindOf(event)}${row === null ? "" : `, ${run().rows[row]}`}`)];
    for (const one of run().findings.filter((each) => each.event === event && (row === null || each.row === row))) {
      parts.push(el("div", { class: "found" }, el("p", {}, el("strong", {}, one.says)), el("p", {}, one.where), el("p", { class: "quiet" }, one.measured), maps(one)));
    }
    const lines = (run().cells.get(at) ?? []).map((line) => run().lines[line]);
    if (lines.length) parts.push(lineTable(lines));
    else if (row !== null) parts.push(el("p", {}, !served ? "The replay did not reach this event." : run().missing.has(at) ? "Not judged: the event computes here, but nothing was compared." : "This event computes nothing here."));
    for (const [, check, reason, where] of run().notes.filter(([when]) => when === event)) {
      parts.push(el("p", { class: "quiet" }, `${check} did not compare: ${reason}${where ? `, ${where}` : ""}`));
    }
    const own = row === null ? [...run().commands[0]] : [...run().commands[row]];
    if (served && own[0]) parts.push(copied(own.join(String(event))));
    parts.push(el("h4", {}, `The event, with a step count of ${stepCount(event)}`));
    parts.push(el("div", { class: "marks" }, ...(marksAt.get(event) ?? []).map((one) => el("div", {}, told(one), one[5] < 0 ? null : tree(data.trees[one[5]])))));
    panel.replaceChildren(...parts);
  }

  function choose(event, row, write = true) {
    Object.assign(state, { event, row });
    root.dataset.selected = event === null ? "" : `${event} ${row === null ? "" : run().rows[row]}`.trim();
    if (write && event !== null) {
      const words = new URLSearchParams({ run: state.run, event, ...(row !== null && { row: run().rows[row] }) });
      history.replaceState(null, "", `#${words}`);
    }
    refresh(); describe();
  }
  function fromAddress() {
    const words = new URLSearchParams(location.hash.slice(1)), named = Number(words.get("run") ?? state.run);
    if (data.runs[named] && named !== state.run) { state.run = named; rebuild(); }
    const event = Number.parseInt(words.get("event"), 10), row = run().rows.indexOf(words.get("row")), first = run().findings[0];
    if (event >= 0 && event < total) choose(event, row < 0 ? null : row, false);
    else if (first) choose(first.event, first.row, false);
    else {  // the cell that used most of its allowance
      const rows = run().rows.length, rank = (used) => (used === -2 ? -0.5 : used);
      const most = run().used.reduce((best, used, at) => (rank(used) > rank(run().used[best]) ? at : best), 0);
      choose(Math.floor(most / rows), most % rows, false);
    }
    const zoom = /^(\d+)-(\d+)$/.exec(words.get("zoom") ?? "");
    if (zoom) look(+zoom[1], +zoom[2]); else if (first) look(run().served - AROUND, run().served + AROUND / 4);
  }
  function look(from, to) {
    chart.dispatchAction({ type: "dataZoom", startValue: Math.max(from, 0) - 0.5, endValue: Math.min(to, total - 1) + 0.5 });
  }
  function keys(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!moves) return;
    event.preventDefault();
    const rows = run().rows.length, within = (value, most) => Math.min(Math.max(value, 0), most);
    choose(within((state.event ?? 0) + moves[0], total - 1), within((state.row ?? 0) + moves[1], rows - 1));
  }

  // ---- the page around them

  function glyph(what, text) {
    const points = SHAPES[what].map((each) => each.map(([a, b]) => `${8 + 6 * a},${8 + 6 * b}`).join(" "));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("width", 16); svg.setAttribute("height", 16);
    for (const each of points) { const made = document.createElementNS(svg.namespaceURI, "polygon"); made.setAttribute("points", each); made.setAttribute("fill", "var(--mark)"); svg.append(made); }
    return el("span", {}, svg, text);
  }
  function sizes() {
    const rows = run().rows.length, lanes = Math.max(...data.lanes, 0) + 1;
    const heat = Math.max(rows * Math.min(24, Math.max(9, 560 / rows)), 60), high = lanes * (lanes > 8 ? 34 : 40);
    return { heat, lanes: high, all: heat + high + 40 + 14 + 44 + 58 };
  }
  function rebuild() {
    const size = sizes(), host = document.getElementById("chart");
    host.style.height = `${size.all}px`;
    for (const button of document.querySelectorAll("#runs button")) button.setAttribute("aria-pressed", String(Number(button.dataset.number) === state.run));
    chart.resize(); chart.setOption(option(size), { notMerge: true });
    look(state.from, state.to); refresh();
  }
  function change(index) {
    const label = run().rows[state.row ?? -1];
    state.run = index;
    rebuild();
    const first = run().findings[0], row = run().rows.indexOf(label);
    if (first) choose(first.event, first.row); else choose(state.event, row < 0 ? null : row);
  }
  function build() {
    const used = new Set(data.marks.map((each) => each[2]));
    const runs = el("span", { id: "runs" }, ...(data.runs.length < 2 ? [] : data.runs.map((each, index) => el("button", { type: "button", "data-number": index,
      click: () => change(index) }, each.name))));
    charts.append(
      el("div", { class: "card" },
        el("div", { class: "bar" }, el("h2", {}, "Layers and events"), runs, ramp(),
          swatch("exact", "exact"), swatch("", "not judged", "hatched"), swatch("", "finding", "finding")),
        el("div", { class: "bar" }, el("h2", {}, "Requests"), ...BLOCKS.filter((what) => used.has(what)).map((what) => swatch(what, what === "commit" ? "commit, as high as accepted" : what)),
          ...Object.keys(SHAPES).filter((what) => used.has(what)).map((what) => glyph(what, what)), el("span", { class: "hint" }, "ctrl + wheel zooms, dragging moves, arrow keys choose")),
        el("div", { id: "chart", tabindex: "0", role: "group", "aria-label": "Heat map of layers and events, timeline of requests; arrow keys move the chosen cell" })),
      el("div", { class: "card", id: "panel", "aria-live": "polite" }));
  }
  state.run = Math.max(data.runs.findIndex((each) => each.findings.length), 0);
  if (!data.runs[state.run].findings.length) state.run = data.runs.reduce((best, each, index) => (each.lines.length > data.runs[best].lines.length ? index : best), 0);
  build();
  chart = window.echarts.init(document.getElementById("chart"), null, { renderer: "canvas" });
  rebuild();
  chart.on("click", ({ seriesId, dataIndex, value }) => {
    const rows = run().rows.length;
    if (seriesId === "marks") choose(state.marks[dataIndex][2][0], null);
    else if (value?.length === 5) choose(Math.floor(value[4] / rows), value[4] % rows);
  });
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    Object.assign(state, { from: Math.max(0, Math.floor(startValue + 0.5)), to: Math.min(total - 1, Math.ceil(endValue - 0.5)) });
    refresh();
  });
  document.getElementById("chart").addEventListener("keydown", keys);
  addEventListener("resize", () => chart.resize());
  addEventListener("hashchange", fromAddress);
  themed(() => { rebuild(); describe(); });
  chart.on("finished", () => { root.dataset.rendered = "true"; });
  fromAddress();
});
