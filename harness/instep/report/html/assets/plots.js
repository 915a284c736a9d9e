// Draws the plots of a page: matrices, curves, bars and intervals. A click on a mark shows its details, a button shows one group.
drawn("plots", (section) => {
  const SIGNS = { yes: "✓", no: "✗", void: "∅" };           // kinds of cells that are drawn as a sign
  const INKS = { yes: "good", no: "bad", void: "unsure" };
  const FILLS = { exact: "exact", found: "bad-fill", meant: "good", also: "also", chosen: "use-1", random: "draft", bad: "bad-fill", held: "good", open: "hatch" };
  const PALETTE = 8, DASHES = ["solid", [7, 3], [2, 3]];     // of lines: number of colours, and line styles if there are more lines
  const NARROW = 560;          // width of a plot below which names are above their rows, or broken into lines
  const FONT = "12px sans-serif";
  const shown = [];            // [plot, card, host, chart]
  const names = [...new Set(data.plots.flatMap((plot) => (plot.lines ?? []).filter((line) => !line.base).map((line) => line.name)))];
  const parts = [...new Set(data.plots.flatMap((plot) => plot.parts ?? []))];
  const lineColor = (line) => (line.base ? "hatch" : `line-${names.indexOf(line.name) % PALETTE}`);
  const dashed = (line) => (line.base ? 0 : Math.floor(names.indexOf(line.name) / PALETTE) % DASHES.length);
  const partColor = (plot, part) => plot.colors?.[part] ?? `line-${parts.indexOf(part) % PALETTE}`;
  const widest = (texts, most) => Math.min(most, Math.max(...texts.map((text) => text.length), 1));
  const label = () => ({ color: color("ink"), fontSize: 12 }), quiet = () => ({ color: color("quiet"), fontSize: 12 });
  const bare = { axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false } };
  const text = (said, x, y, more = {}) => ({ type: "text", silent: true, style: { text: said, x, y, font: FONT, fill: color("ink"), verticalAlign: "middle", ...more } });

  // ---- one function per form: the height of a plot, and its option for the library

  function matrix(plot, width) {
    const narrow = width < NARROW && !plot.numbered;
    const heads = plot.columns, longest = widest(heads, 34), high = narrow ? 34 : plot.rows.length > 60 ? 15 : 18;
    const left = narrow ? 2 : Math.min(30 + 7.2 * widest(plot.rows.map((row) => row.name), 44), 0.5 * width), top = plot.numbered ? 24 : 22 + (narrow ? 7 : 5.4) * longest;
    const across = narrow ? Math.min(44, (width - 4) / heads.length) : Math.min(44, Math.max(20, 660 / heads.length));
    const whole = plot.cells.map(([row, column, value], index) => [column, row, index, typeof value === "number" ? levelOf(value) : 0]);
    const levelled = (yes) => whole.filter(([, , index]) => (typeof plot.cells[index][2] === "number") === yes);
    const draw = (params, api) => {
      const [, column, value, sign, , last] = plot.cells[api.value(2)], [x, middle] = api.coord([api.value(0), api.value(1)]), [wide, row1] = api.size([1, 1]);
      const tall = narrow ? row1 / 2 : row1, y = narrow ? middle + row1 / 4 : middle;
      const gap = wide > 6 ? 1 : 0, shape = { x: x - wide / 2 + gap, y: y - tall / 2 + 1, width: Math.max(wide * (1 + (last ?? column) - column) - 2 * gap, 1), height: tall - 2 };
      if (typeof value === "number") return { type: "rect", shape, style: { fill: api.visual("color") } };
      if (value === "missing") return { type: "rect", shape, style: { fill: hatch() } };
      if (value === "silent") return { type: "circle", shape: { cx: x, cy: y, r: 2 }, style: { fill: color("hatch") } };
      if (!SIGNS[value]) return { type: "rect", shape: { ...shape, r: 2 }, style: { fill: color(FILLS[value]), ...(value === "found" && { stroke: color("bad"), lineWidth: 2 }) } };
      return { type: "group", children: [{ type: "rect", shape, style: { fill: "transparent" } }, text(sign ?? SIGNS[value], x, y, { fill: color(INKS[value]), align: "center", font: "bold 13px sans-serif" })] };
    };
    const series = { type: "custom", renderItem: draw, encode: { x: 0, y: 1 }, animation: false, clip: true };
    const named = { ...series, silent: true, clip: false, data: narrow ? plot.rows.map((_, row) => [0, row]) : [], renderItem: (params, api) => {
      const [, y] = api.coord([0, api.value(1)]);
      return text(plot.rows[api.value(1)].name, left, y - high / 4);
    } };
    return { height: top + high * plot.rows.length + 14 + (plot.numbered ? 26 : 0), option: {
      grid: { left, ...(plot.numbered && { right: 18 }), top, bottom: plot.numbered ? 36 : 6, ...(!plot.numbered && { width: across * heads.length }) },
      xAxis: { type: "category", data: heads, position: "top", ...bare, axisLabel: plot.numbered ? quiet() : { ...label(), interval: 0, rotate: narrow ? 90 : 50, width: 240, overflow: "truncate" } },
      yAxis: { type: "category", data: plot.rows.map((row) => row.name), inverse: true, ...bare, axisLabel: { ...label(), show: !narrow, interval: 0, width: left - 16, overflow: "truncate" } },
      ...(plot.numbered && { dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", filterMode: "none" }, { type: "slider", height: 18, bottom: 4, left, right: 18, filterMode: "none", showDataShadow: false, textStyle: quiet(), borderColor: color("line") }] }),
      visualMap: levels(), series: [{ ...series, data: levelled(true) }, { ...series, data: levelled(false) }, named],
    }, at: ({ value }) => { return cellTold(plot, ...plot.cells[value[2]]); } };
  }
  function cellTold(plot, row, column, is, sign, told, last) {
    const what = typeof is === "number" ? `${number(is)} of the allowance used` : data.says?.[`${is} ${sign}`] ?? data.says?.[is] ?? is;
    const own = plot.rows[row].told ?? {};
    return { title: `${plot.rows[row].name}, ${plot.numbered ?? ""}${plot.columns[column]}${last > column ? ` to ${plot.columns[last]}` : ""}`, lines: [told ?? what, ...(own.lines ?? [])], message: own.message, commands: own.commands };
  }
  function curves(plot) {
    const points = plot.lines.flatMap((line) => line.points.filter(([, y]) => y > 0)), ys = points.map(([, y]) => y), xs = [...new Set(plot.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
    const most = Math.max(...ys), bad = () => ({ color: color("bad-fill"), borderColor: color("bad"), borderWidth: 2 }), [low, high] = ys.length ? [Math.min(...ys) / 1.15, most * 1.3] : [1, 10];
    const axis = { type: "log", axisLine: { lineStyle: lineStyle() }, axisTick: { show: false }, splitLine: { lineStyle: lineStyle() }, axisLabel: { ...quiet(), formatter: (at) => `${+at.toPrecision(3)}` }, nameTextStyle: quiet() };
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) for (const step of high / low < 5 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 5]) { const at = step * 10 ** power; if (at >= low && at <= high) ticks.push(Math.log10(at)); }
    const series = plot.lines.map((line) => ({ type: "line", name: line.name, animation: false, symbolSize: 9, symbol: line.base ? "none" : "circle", connectNulls: false, clip: false,
      lineStyle: { color: color(lineColor(line)), width: 2, type: line.base ? "dashed" : DASHES[dashed(line)] },
      itemStyle: { color: color(lineColor(line)) },
      data: line.points.map(([x, y, wrong], index) => (y > 0 ? { value: [x, y, index], ...(wrong && { symbol: "diamond", symbolSize: 13, itemStyle: bad() }) } : "-")),
    }));
    // A point without a time is drawn at the top, without a line to it.
    plot.lines.forEach((line, number) => series.push({ type: "line", animation: false, clip: false, symbol: "rect", symbolSize: 15, lineStyle: { width: 0 }, itemStyle: bad(), z: 5,
      data: line.points.flatMap(([x, y], index) => (y > 0 ? [] : [{ value: [x, high, index, number] }])) }));
    return { height: 290, option: {
      grid: { left: 58, right: 18, top: 26, bottom: 44 },
      xAxis: { ...axis, splitLine: { show: false }, min: xs[0] / 1.1, max: xs.at(-1) * 1.1, name: plot.x, nameLocation: "middle", nameGap: 26, axisLabel: { ...quiet(), customValues: xs, formatter: (at) => `${+at.toPrecision(6)}` } },
      yAxis: { ...axis, min: low, max: high, name: plot.y, nameTextStyle: { ...quiet(), align: "left", padding: [0, 0, 0, -50] }, axisLabel: { ...axis.axisLabel, customValues: ticks.map((at) => 10 ** at) } },
      series,
    }, at: ({ seriesIndex, value }) => plot.lines[value[3] ?? seriesIndex].points[value[2]][3] };
  }
  function bars(plot, width) {
    const left = Math.min(14 + 7.2 * widest(plot.names, 34), 0.4 * width), most = Math.max(...plot.names.map((_, row) => plot.parts.reduce((sum, part) => sum + (plot.values[part][row] ?? 0), 0)), 1e-9), flat = [];
    plot.names.forEach((_, row) => { let from = 0; plot.parts.forEach((part, index) => { const value = plot.values[part][row] ?? 0; if (value) flat.push([from, from += value, row, index]); }); });
    const draw = (params, api) => {
      const [x, y] = api.coord([api.value(0), api.value(2)]), [end] = api.coord([api.value(1), api.value(2)]), tall = api.size([0, 1])[1] * 0.66, wide = Math.max(end - x, 1);
      const value = api.value(1) - api.value(0), said = number(value), fill = color(partColor(plot, plot.parts[api.value(3)]));
      return { type: "group", children: [{ type: "rect", shape: { x, y: y - tall / 2, width: wide, height: tall }, style: { fill } },
        ...(wide > 8 + 7 * said.length ? [text(said, x + wide / 2, y, { fill: color("on"), align: "center" })] : [])] };
    };
    return { height: 52 + 30 * plot.names.length, option: {
      grid: { left, right: 18, top: 10, bottom: 36 },
      xAxis: { type: "value", max: most, axisLabel: { ...quiet(), hideOverlap: true }, splitLine: { lineStyle: lineStyle() }, name: plot.x, nameLocation: "middle", nameGap: 24, nameTextStyle: quiet() },
      yAxis: { type: "category", data: plot.names, inverse: true, ...bare, axisLabel: { ...label(), width: left - 16, overflow: width < NARROW ? "break" : "truncate" } },
      series: [{ type: "custom", renderItem: draw, encode: { x: [0, 1], y: 2 }, animation: false, data: flat }],
    }, at: ({ value: [from, to, row, part] }) => ({ title: `${plot.names[row]}: ${plot.parts[part]}`, lines: [`${number(to - from)} ${plot.x}`, ...(plot.told?.[row] ?? [])] }) };
  }
  function intervals(plot, width) {
    const left = Math.min(14 + 7.2 * widest(plot.rows.map((row) => row.name), 40), 0.4 * width), [begin, end] = plot.band, every = plot.rows.flatMap((row) => [row.low, row.high]).filter(Number.isFinite);
    const low = Math.min(begin, 1, ...every), high = Math.max(end, ...every), room = (high - low) * 0.08;
    const draw = (params, api) => {
      const row = plot.rows[params.dataIndex], [x, y] = api.coord([row.value, params.dataIndex]), [from] = api.coord([row.low, params.dataIndex]), [to] = api.coord([row.high, params.dataIndex]);
      const stroke = color(row.color), style = { stroke, lineWidth: row.thin ? 2 : 4 }, cap = (at) => ({ type: "line", shape: { x1: at, x2: at, y1: y - 6, y2: y + 6 }, style });
      return { type: "group", children: [{ type: "rect", shape: { x: Math.min(from, to) - 6, y: y - 10, width: Math.abs(to - from) + 12, height: 20 }, style: { fill: "transparent" } },
        { type: "line", shape: { x1: from, x2: to, y1: y, y2: y }, style }, cap(from), cap(to), ...(row.dots ?? []).map((at) => ({ type: "circle", shape: { cx: api.coord([Math.min(Math.max(at, low - room), high + room), 0])[0], cy: y + 9, r: 1.5 }, style: { fill: stroke, opacity: 0.4 } })), { type: "circle", shape: { cx: x, cy: y, r: row.thin ? 4 : 6 }, style: { fill: stroke } }] };
    };
    const band = (params, api) => {
      const [x] = api.coord([begin, 0]), [to] = api.coord([end, 0]), [one] = api.coord([1, 0]), { y, height } = params.coordSys;
      return { type: "group", silent: true, children: [{ type: "rect", shape: { x, y, width: to - x, height }, style: { fill: color("stay") } },
        { type: "line", shape: { x1: one, x2: one, y1: y, y2: y + height }, style: { stroke: color("quiet"), lineDash: [5, 4], lineWidth: 1.5 } }] };
    };
    return { height: 62 + 30 * plot.rows.length, option: {
      grid: { left, right: 24, top: 10, bottom: 44 },
      xAxis: { type: "value", min: low - room, max: high + room, axisLabel: { ...quiet(), formatter: (at) => at.toFixed(2), hideOverlap: true, showMinLabel: false, showMaxLabel: false }, splitLine: { show: false }, name: plot.x, nameLocation: "middle", nameGap: 26, nameTextStyle: quiet() },
      yAxis: { type: "category", data: plot.rows.map((row) => row.name), inverse: true, ...bare, axisLabel: { ...label(), width: left - 16, overflow: width < NARROW ? "break" : "truncate" } },
      series: [{ type: "custom", renderItem: band, silent: true, data: [[1, 0]], animation: false, encode: { x: 0, y: 1 } },
        { type: "custom", id: "rows", renderItem: draw, z: 3, animation: false, encode: { x: 0, y: 1 }, data: plot.rows.map((row, index) => [row.value, index]) }],
    }, at: ({ dataIndex }) => plot.rows[dataIndex].told };
  }
  const FORMS = { matrix, curves, bars, intervals };

  // ---- the page around them

  const panel = el("div", { class: "card", id: "detail", "aria-live": "polite" }, el("p", { class: "quiet" }, "Click a mark to see its details here."));
  function tell(told) {
    if (!told) return;
    panel.replaceChildren(el("h3", {}, told.title), ...(told.lines ?? []).filter(Boolean).map((line) => el("p", {}, line)),
      ...(told.message ? [el("pre", { class: "message" }, told.message)] : []), ...(told.commands ?? []).map(copied));
    root.dataset.told = told.title;
  }
  function legend(plot) {
    const spans = plot.form === "curves" ? plot.lines.map((line) => swatch(lineColor(line), line.name, line.base ? "floor" : dashed(line) ? "dashed" : ""))
      : plot.form === "bars" ? plot.parts.map((part) => swatch(partColor(plot, part), part)) : [];
    return spans.length ? el("div", { class: "bar" }, ...spans) : null;
  }
  function draw() {
    for (const each of shown) {
      each.width = each.host.clientWidth || cards.clientWidth;
      const { height, option, at } = FORMS[each.plot.form](each.plot, each.width);
      each.host.style.height = `${height}px`;
      each.at = at;
      if (each.card.hidden) continue;
      if (!each.chart) {
        each.chart = window.echarts.init(each.host, null, { renderer: "canvas" });
        each.chart.on("click", (params) => tell(each.at(params)));
        each.chart.on("finished", () => { each.done = true; root.dataset.plots = shown.filter((one) => one.done).length; });
      }
      each.chart.resize();
      each.chart.setOption({ backgroundColor: "transparent", textStyle: { color: color("ink"), fontFamily: "sans-serif" }, animation: false, ...option,
        tooltip: tip((params) => { const told = each.at(params); return told ? hint([told.title, ...(told.lines ?? []).filter(Boolean)]) : ""; }) }, { notMerge: true });
    }
  }
  function choose(group) {
    for (const each of shown) each.card.hidden = group !== "" && each.plot.group !== group;
    for (const row of document.querySelectorAll("tr[data-group]")) row.hidden = group !== "" && row.dataset.group !== group;
    for (const button of section.querySelectorAll("#groups button")) button.setAttribute("aria-pressed", String(button.dataset.group === group));
    root.dataset.group = group;
    history.replaceState(null, "", group ? `#${new URLSearchParams({ group })}` : location.pathname + location.search + location.hash.replace(/^#group=.*/, ""));
    draw();
  }
  const groups = [...new Set(data.plots.map((plot) => plot.group).filter(Boolean))];
  const buttons = groups.length < 2 ? [] : ["", ...groups].map((group) => el("button", { type: "button", "data-group": group, click: () => choose(group) }, group || "all"));
  const says = (data.legend ?? []).map(([kind, words, sign]) => (kind === "ramp" ? ramp() : kind === "missing" ? swatch("", words, "hatched") : kind === "found" || kind === "bad" ? swatch("", words, "finding")
    : kind === "silent" ? swatch("", words, "dot") : SIGNS[kind] ? el("span", {}, el("b", { style: `color:var(--${INKS[kind]})` }, sign ?? SIGNS[kind]), words) : swatch(FILLS[kind], words)));
  const cards = el("div", { id: "cards" });
  for (const plot of data.plots) {
    const host = el("div", { role: "img", "aria-label": plot.title, class: "plot" });
    const card = el("div", { class: `card ${plot.form}` }, el("h3", {}, plot.title), legend(plot), host);
    cards.append(card); shown.push({ plot, card, host });
  }
  section.append(...(buttons.length ? [el("div", { class: "bar", id: "groups" }, ...buttons)] : []), ...(says.length ? [el("div", { class: "bar" }, ...says)] : []), el("div", { id: "look" }, cards, panel));
  const named = new URLSearchParams(location.hash.slice(1)).get("group");
  if (groups.includes(named)) choose(named); else draw();
  if (data.first) tell(data.first);
  addEventListener("resize", () => (shown.some((each) => !each.card.hidden && each.width !== each.host.clientWidth) ? draw() : 0));
  themed(draw);
});
