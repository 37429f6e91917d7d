"use strict";
(async () => {
  const at = id => document.getElementById(id);
  const make = (tag, attributes = {}, ...inside) => {
    const space = { svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML" }[attributes.space];
    const { space: _, ...rest } = attributes;
    const out = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(rest)) out.setAttribute(name, value);
    out.append(...inside);
    return out;
  };
  const svg = (tag, attributes, ...inside) => make(tag, { space: "svg", ...attributes }, ...inside);
  const math = (tag, ...inside) => make(tag, { space: "math" }, ...inside);
  const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const short = (x, unit) => {
    if (!Number.isFinite(x)) return "undefined here";
    const [scale, prefix] = PREFIXES.find(([s]) => Math.abs(x) >= s) ?? [1, ""];
    return `${Number((x / scale).toPrecision(4))} ${prefix}${unit}`;
  };
  const clock = s => !Number.isFinite(s) ? "undefined here" : s >= 1 || s === 0 ? `${Number(s.toPrecision(4))} s`
    : s >= 1e-3 ? `${Number((s * 1e3).toPrecision(4))} ms` : `${Number((s * 1e6).toPrecision(4))} µs`;
  const grouped = text => text.replace(/\B(?=(\d{3})+$)/g, ",");
  const digits = (engine, row) => { // all of them where it is a whole number
    const found = engine.exact(row);
    return found && found[1] === 1n ? grouped(found[0].toString())
      : engine.number(row).toLocaleString("en", { maximumFractionDigits: 3 });
  };

  const data = await unpacked(at("data").textContent);
  const engine = new Engine(data.tables);
  const state = { view: 0, device: Math.max(0, data.devices.findIndex(d => d.id === "h100-sxm")), sizes: { ...data.sizes } };
  const LARGEST = 2 ** 53 - 1;

  // -- formulas as MathML ------------------------------------------------------------------------------------------

  const symbol = name => math("mi", name);
  const joined = (parts, mark) => parts.flatMap((p, i) => i ? [math("mo", mark), p] : [p]);
  const generator = i => {
    const g = data.tables.generators[i];
    if (typeof g === "string") return symbol(g);
    const [name, ...rows] = g, inside = rows.map(sum);
    if (name === "pow") return math("msup", math("mrow", math("mo", "("), inside[0], math("mo", ")")), inside[1]);
    const [open, close] = { floor: ["⌊", "⌋"], ceil: ["⌈", "⌉"] }[name] ?? ["(", ")"];
    return math("mrow", ...(open === "(" ? [math("mo", name)] : []), math("mo", open), ...joined(inside, ","), math("mo", close));
  };
  const product = (monomial, coefficient) => {
    const [above, below] = String(coefficient).replace("-", "").split("/"), over = [], under = [];
    const m = data.tables.monomials[monomial];
    for (let f = 0; f < m.length; f += 2) {
      const e = Math.abs(m[f + 1]), g = generator(m[f]);
      (m[f + 1] > 0 ? over : under).push(e === 1 ? g : math("msup", g, math("mn", String(e))));
    }
    if (above !== "1" || !over.length) over.unshift(math("mn", grouped(above)));
    if (below) under.unshift(math("mn", grouped(below)));
    return under.length ? math("mfrac", math("mrow", ...over), math("mrow", ...under)) : math("mrow", ...over);
  };
  const sum = row => {
    const terms = data.tables.rows[row], out = [];
    for (let t = 0; t < terms.length; t += 2) {
      const minus = String(terms[t + 1]).startsWith("-");
      if (t || minus) out.push(math("mo", minus ? "−" : "+"));
      out.push(product(terms[t], terms[t + 1]));
    }
    return math("mrow", ...(out.length ? out : [math("mn", "0")]));
  };

  // -- tables ------------------------------------------------------------------------------------------------------

  const table = (heads, rows) => make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map(h => make("th", { scope: "col" }, h)))),
    make("tbody", {}, ...rows.map(r => make("tr", {}, ...r.map(c => make("td", {}, c))))));
  const say = (element, words) => { if (element.textContent !== words) element.textContent = words; };
  const fill = (target, heads, rows) => { // cells stay where they are: a slider that moves changes their words alone
    const body = target.querySelector("tbody");
    if (body?.rows.length !== rows.length) return target.replaceChildren(table(heads, rows));
    [...body.rows].forEach((row, i) => [...row.cells].forEach((cell, j) => say(cell, rows[i][j])));
  };
  const card = (title, value, detail, kind = "", key = "") => {
    const old = at("cards").querySelector(`[data-key=${key}]`);
    const [top, middle, low] = old?.children ?? [make("span"), make("b"), make("small")];
    say(top, title);
    say(middle, value);
    say(low, detail);
    if (middle.className !== kind) middle.className = kind;
    if (!old) at("cards").append(make("div", { class: "card", "data-key": key }, top, middle, low));
  };

  /** The views of the stages of the same pipeline; the view itself where there is none. */
  const together = view => view.pipeline ? view.pipeline.map(i => data.views[i]) : [view];

  const cards = (view, device, peak, times, low) => {
    const room = device.capacity, bytes = engine.number(peak[0]), fits = bytes <= room;
    const total = name => [engine.number(view.totals[name]), digits(engine, view.totals[name])];
    const [flops, flopDigits] = total("flops"), [moved, movedDigits] = total("bytes"), [params, paramDigits] = total("params");
    const parts = together(view), several = parts.length > 1;
    const estimate = times && (several ? pipelined(engine, parts, device, state.device) : times.reduce((s, t) => s + t.seconds, 0));
    const links = parts.flatMap(v => [...v.ops.map(op => op.sent?.[state.device]), v.sends?.[state.device]]);
    const why = device.refused ?? links.find(s => typeof s === "string");
    const time = times && Number.isFinite(estimate) ? clock(estimate) : "no time";
    const fit = fits ? "fits" : "does not fit";
    const largest = Math.max(...parts.map(v => engine.number(v.peak[holding(engine, v.peak)][0])));
    card(several ? "peak memory of this stage" : "peak memory", short(bytes, "B"), `${digits(engine, peak[0])} B`, "", "peak");
    card(`${device.id}, ${short(room, "B")}`, fit, `${(100 * bytes / room).toFixed(1)}% of the memory` + (several ? `, the largest stage ${(100 * largest / room).toFixed(1)}%` : ""), fits ? "good" : "bad", "fits");
    card("FLOPs", short(flops, "FLOP"), `${flopDigits} FLOP`, "", "flops");
    card(several ? "time of the pipeline" : "time, estimate", time, why ?? `no run is faster than ${clock(low)}`, "", "estimate");
    card("bytes moved, unfused", short(moved, "B"), `${movedDigits} B`, "", "bytes");
    card("parameters", short(params, ""), paramDigits, "", "params");
    Object.assign(document.body.dataset, { estimate: String(estimate), least: String(low) });
    return `peak memory ${short(bytes, "B")}, ${fit} on ${device.name}; time ${time}`;
  };

  let held = null;
  const holder = (view, peak, i) => {
    say(at("holder"), `${peak[1]} (${peak[2]}), case ${i + 1} of ${view.peak.length}` + (peak[3] ? `: ${peak[3]}` : ""));
    if (held !== peak) at("formula").replaceChildren(math("math", sum(peak[0])));
    held = peak;
    const bytes = engine.number(peak[0]);
    fill(at("roles"), ["role", "bytes", "share"], peak[4].map(([role, row]) =>
      [role, digits(engine, row), `${(100 * engine.number(row) / bytes).toFixed(1)}%`]));
  };

  const ops = times => {
    const whole = times.reduce((s, t) => s + t.seconds, 0);
    const rows = [...times].sort((x, y) => y.seconds - x.seconds).slice(0, 20);
    fill(at("ops"), ["op", "phase", "FLOPs", "bytes", "time", "of time", "bound"], rows.map(t =>
      [t.op.op, t.op.phase, short(t.flops, "FLOP"), short(t.bytes, "B"), clock(t.seconds), `${(100 * t.seconds / whole).toFixed(1)}%`, t.bound]));
  };

  const communication = (view, times) => {
    const sent = view.ops.flatMap((op, i) => op.sent ? [[op, times?.[i]]] : []);
    at("communication").hidden = !sent.length;
    fill(at("sent"), ["op", "collective", "axis", "phase", "bytes in memory", "time"], sent.map(([op, t]) =>
      [op.op, op.collective, op.axis, op.phase, short(engine.number(op.bytes), "B"), t ? clock(t.seconds) : ""]));
  };

  // -- pictures ----------------------------------------------------------------------------------------------------

  const roofline = (device, times) => {
    const box = { w: Math.max(300, Math.min(1000, at("roofline").clientWidth)), h: 360, left: 60, bottom: 40, top: 12, right: 12 };
    const shown = times.filter(t => t.flops > 0 && t.bytes > 0 && t.seconds > 0);
    const roof = Math.max(...data.keys.map((_, k) => device.rates[k])), ridge = roof / device.bandwidth;
    if (!shown.length) return at("roofline").replaceChildren("no op has both FLOPs and bytes");
    const x = shown.map(t => t.flops / t.bytes), y = shown.map(t => t.flops / t.seconds);
    const range = v => [Math.floor(Math.log10(Math.min(...v))), Math.ceil(Math.log10(Math.max(...v)))];
    const longest = Math.max(...shown.map(t => t.seconds)), left = Math.min(.1, ridge / 100); // others lie on the edge
    const far = (v, low) => v.filter((_, i) => shown[i].seconds > longest / 100).map(n => Math.max(n, low));
    const [x0, x1] = range([...far(x, left), ridge * 2]), [y0, y1] = range([...far(y, left * device.bandwidth / 10), roof * 1.2]);
    const px = v => box.left + (Math.log10(v) - x0) / (x1 - x0) * (box.w - box.left - box.right);
    const py = v => box.h - box.bottom - (Math.log10(v) - y0) / (y1 - y0) * (box.h - box.bottom - box.top);
    const key = [state.view, device.id, x0, x1, y0, y1, shown.length, box.w].join();
    if (framed?.key !== key || !framed.picture.isConnected) framed = { key, ...frame(device, shown.length, { box, x0, x1, y0, y1, px, py, roof, ridge }) };
    shown.forEach((t, i) => {
      const dot = framed.dots[i], r = 2.5 + 14 * Math.sqrt(t.seconds / longest);
      const now = { class: t.bound, cx: px(Math.max(x[i], 10 ** x0)).toFixed(1), cy: py(Math.max(y[i], 10 ** y0)).toFixed(1), r: r.toFixed(1) };
      for (const [name, value] of Object.entries(now)) if (dot[name] !== value) dot.element.setAttribute(name, dot[name] = value);
      dot.words = () => `${t.op.op} (${t.op.phase}): ${short(t.flops / t.bytes, "FLOP/B")}, ${short(t.flops / t.seconds, "FLOP/s")}, ${clock(t.seconds)}, ${t.bound}-bound`;
    });
  };
  let framed = null;
  const frame = (device, count, { box, x0, x1, y0, y1, px, py, roof, ridge }) => {
    const picture = svg("svg", { width: box.w, height: box.h, viewBox: `0 0 ${box.w} ${box.h}`, role: "img",
      "aria-label": `roofline of ${device.name}: ${count} ops, ridge point at ${ridge.toFixed(0)} FLOP per byte` });
    const text = (words, left, top, more = {}) => picture.append(svg("text", { x: left, y: top, ...more }, words));
    for (let e = x0; e <= x1; e++) {
      picture.append(svg("line", { class: "grid", x1: px(10 ** e), x2: px(10 ** e), y1: box.top, y2: box.h - box.bottom }));
      text(short(10 ** e, ""), px(10 ** e), box.h - box.bottom + 14, { "text-anchor": "middle" });
    }
    for (let e = y0; e <= y1; e++) {
      picture.append(svg("line", { class: "grid", y1: py(10 ** e), y2: py(10 ** e), x1: box.left, x2: box.w - box.right }));
      text(short(10 ** e, ""), box.left - 6, py(10 ** e) + 4, { "text-anchor": "end" });
    }
    text("FLOP/B", box.w / 2, box.h - 6);
    text("FLOP/s", box.left + 6, box.top + 12);
    const from = Math.max(10 ** x0, 10 ** y0 / device.bandwidth);
    picture.append(svg("polyline", { class: "roof", points:
      [[from, from * device.bandwidth], [ridge, roof], [10 ** x1, roof]].map(([a, b]) => `${px(a)},${py(b)}`).join(" ") }));
    const told = make("p", { class: "dot" }, "A circle is an op, its area the time: point at one. Bound by ",
      ...["compute", "memory", "link"].flatMap((bound, i) => [i ? ", " : "", make("span", { class: `key ${bound}` }), ` ${bound}`]));
    const dots = Array.from({ length: count }, () => {
      const dot = { element: svg("circle", { "fill-opacity": .45 }) };
      dot.element.addEventListener("pointerover", () => { told.textContent = dot.words(); });
      return dot;
    });
    picture.append(...dots.map(dot => dot.element));
    at("roofline").replaceChildren(picture, told);
    return { picture, dots };
  };

  // as plots of the library have them, from below: what stays, then what comes and goes
  const COLOURS = { param: "#0072b2", buffer: "#7a7a7a", cache: "#56b4e9", input: "#bbbbbb", state: "#cc79a7",
    gradient: "#009e73", output: "#f0e442", activation: "#e69f00", temporary: "#d55e00", workspace: "#a05fb4" };
  const ROLES = Object.keys(COLOURS), rank = role => ROLES.includes(role) ? ROLES.indexOf(role) : ROLES.length;
  const colourOf = role => COLOURS[role] ?? "#5f8a3d";
  let chart = null;
  /** Where phases begin, and iterations within them: the first, a middle and the last layer. */
  const marks = steps => {
    const named = steps.map(([, op, phase], at) => ({ at, phase, place: /(\[[^\]]*\])*$/.exec(op)[0] }));
    return named.filter(({ at, phase, place }) => !at || phase !== named[at - 1].phase || place !== named[at - 1].place)
      .map(({ at, phase, place }) => at && phase === named[at - 1].phase ? { at, words: place } : { at, words: phase, phase });
  };
  /** Marks that have room for their words, phases before iterations. */
  const spread = (found, pixels) => {
    const kept = [], room = m => kept.every(k => Math.abs(k.at - m.at) * pixels > 5 * (k.words.length + m.words.length));
    for (const m of [...found.filter(m => m.phase), ...found.filter(m => !m.phase && m.words)]) if (room(m)) kept.push(m);
    return kept.sort((a, b) => a.at - b.at);
  };
  const memory = (view, device) => {
    const found = timeline(engine, view.memory).filter(r => r.bytes.some(b => b > 0)).sort((x, y) => rank(x.role) - rank(y.role));
    const steps = view.memory.steps, below = steps.map(() => 0);
    const stacked = found.map(r => r.bytes.map((b, i) => below[i] += b));
    const most = Math.max(...below), colour = getComputedStyle(document.body).color;
    const lines = [...stacked.reverse(), steps.map(() => device.capacity < 3 * most ? device.capacity : null)];
    const key = `${state.view} ${found.map(r => r.role)} ${colour}`;
    const xs = steps.map((_, i) => i), values = [xs, ...lines];
    if (chart?.key === key) return chart.plot.setData(values);
    chart?.plot.destroy();
    const series = found.map(({ role }) => ({ label: role, fill: colourOf(role), stroke: colourOf(role), width: 1,
      points: { show: false }, value: (u, v, s, at) => at === null ? "" : short(timeline(engine, data.views[state.view].memory).find(r => r.role === role).bytes[at], "B") })).reverse();
    series.push({ label: "capacity", stroke: colour, dash: [6, 4], points: { show: false }, value: (u, v) => v === null ? "" : short(v, "B") });
    const axis = { stroke: colour, grid: { stroke: "#8884" } }, places = marks(steps);
    const along = { ...axis, splits: u => spread(places, u.bbox.width / devicePixelRatio / steps.length).map(m => m.at),
      values: (u, at) => at.map(i => places.find(m => m.at === i).words) };
    const where = (u, v, s, at) => at === null ? "" : `${data.views[state.view].memory.steps[at][1]} (${data.views[state.view].memory.steps[at][2]})`;
    const plot = new uPlot({ width: at("memory").clientWidth, height: 300, scales: { x: { time: false }, y: { range: (u, low, high) => [0, high * 1.05] } },
      series: [{ label: "step", value: where }, ...series],
      axes: [along, { ...axis, size: 80, values: (u, ticks) => ticks.map(v => short(v, "B")) }] }, values, at("memory"));
    chart = { key, plot };
  };

  // -- state -------------------------------------------------------------------------------------------------------

  const draw = () => {
    const view = data.views[state.view], device = data.devices[state.device];
    engine.set(state.sizes);
    const broken = violated(engine, view);
    at("warnings").replaceChildren(...(broken.length ? ["These sizes violate: ", make("ul", {}, ...broken.map(b => make("li", {}, b)))] : []));
    const i = holding(engine, view.peak), times = spent(engine, view, device, state.device);
    if (i < 0) return at("warnings").append(" The formulas are undefined at these sizes.");
    const words = cards(view, device, view.peak[i], times, times && Math.max(...together(view).map(v => least(engine, v, device, state.device))));
    const parts = {
      holder: () => holder(view, view.peak[i], i),
      memory: () => memory(view, device),
      roofline: () => times ? roofline(device, times) : at("roofline").replaceChildren(device.refused),
      ops: () => times ? ops(times) : at("ops").replaceChildren(device.refused),
      sent: () => communication(view, times),
    };
    stale = new Map(Object.entries(parts));
    say(at("notes"), device.notes?.join("; ") ?? "");
    catchUp(inSight);
    clearTimeout(resting);
    resting = setTimeout(() => { catchUp(null); say(at("spoken"), words); }, 150);
  };
  // What is out of sight is drawn when it comes into sight or the slider rests: a frame has 16 ms for all of it.
  let stale = new Map(), resting = 0;
  const inSight = new Set(["holder", "memory", "roofline", "ops", "sent"]);
  const catchUp = only => stale.forEach((part, name) => {
    if (only && !only.has(name)) return;
    stale.delete(name);
    part();
  });
  const watcher = new IntersectionObserver(found => {
    for (const { target, isIntersecting } of found) inSight[isIntersecting ? "add" : "delete"](target.dataset.part);
    catchUp(inSight);
  });
  document.querySelectorAll("[data-part]").forEach(section => watcher.observe(section));
  let due = 0;
  const later = () => { due ||= requestAnimationFrame(() => { due = 0; draw(); }); };
  const hash = () => "#" + new URLSearchParams({ view: data.views[state.view].name, device: data.devices[state.device].id, ...state.sizes });
  const remember = () => { try { history.replaceState(null, "", hash()); } catch { /* a notebook's frame has no address */ } };
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const place = (list, key, name) => { const i = list.findIndex(x => x[key] === given.get(name)); if (i >= 0) state[name] = i; };
    place(data.views, "name", "view");
    place(data.devices, "id", "device");
    for (const name of Object.keys(state.sizes)) {
      const size = Number(given.get(name));
      if (Number.isInteger(size) && size >= 1 && size <= LARGEST) state.sizes[name] = size;
    }
  };

  const sliders = () => {
    const names = data.views[state.view].sizes;
    at("sizes").replaceChildren(...names.map(name => {
      const top = Math.max(20, Math.ceil(Math.log2(data.sizes[name])) + 3);
      const slider = make("input", { type: "range", min: 0, max: top, step: .25, "aria-label": `${name}, slider` });
      const box = make("input", { type: "number", min: 1, max: LARGEST, step: 1, id: `size-${name}`, "aria-label": `${name}, size` });
      const show = () => { slider.value = Math.log2(state.sizes[name]); box.value = state.sizes[name]; slider.setAttribute("aria-valuetext", box.value); };
      const put = size => { state.sizes[name] = size; box.value = size; slider.setAttribute("aria-valuetext", size); later(); };
      slider.addEventListener("input", () => put(Math.max(1, Math.round(2 ** slider.value))));
      slider.addEventListener("change", remember);
      box.addEventListener("input", () => {
        const size = Number(box.value), good = Number.isInteger(size) && size >= 1 && size <= LARGEST;
        box.setCustomValidity(good ? "" : "a whole number from 1 on");
        if (good) { put(size); slider.value = Math.log2(size); remember(); }
      });
      box.addEventListener("blur", show);
      show();
      const described = data.legend[name] ? [make("span", { class: "described" }, data.legend[name])] : [];
      return make("div", { class: "size" }, make("label", { for: `size-${name}` }, name), slider, box, ...described);
    }));
  };

  const select = (id, names, groups = []) => {
    const options = names.map((n, i) => make("option", { value: i }, n)), kinds = [...new Set(groups)];
    const grouped = kinds.map(kind => make("optgroup", { label: kind }, ...options.filter((_, i) => groups[i] === kind)));
    at(id).replaceChildren(...(kinds.length > 1 ? grouped : options));
    at(id).addEventListener("change", () => { state[id] = Number(at(id).value); sliders(); remember(); later(); });
  };
  select("view", data.views.map(v => v.name), data.views.map(v => v.group));
  select("device", data.devices.map(d => d.name));
  const restore = () => { read(); at("view").value = state.view; at("device").value = state.device; sliders(); later(); };
  addEventListener("hashchange", restore);
  addEventListener("resize", () => {
    chart?.plot.setSize({ width: at("memory").clientWidth, height: 300 });
    later();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  const told = words => { at("told").textContent = words; };
  at("link").addEventListener("click", async () => {
    remember();
    try { await navigator.clipboard.writeText(location.href.split("#")[0] + hash()); told("copied"); } catch { told("the address has it"); }
  });

  const quoted = value => /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
  const csv = () => {
    const view = data.views[state.view], times = spent(engine, view, data.devices[state.device], state.device);
    const rows = view.ops.map((op, i) => [op.op, op.phase, times ? times[i].flops : "", engine.number(op.bytes), times ? times[i].seconds : "", times ? times[i].bound : ""]);
    return [["op", "phase", "FLOPs", "bytes", "seconds", "bound"], ...rows].map(r => r.map(quoted).join(",")).join("\r\n") + "\r\n";
  };
  at("csv").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    make("a", { href: url, download: `${data.name}.csv` }).click();
    URL.revokeObjectURL(url);
  });
  restore();
})();
