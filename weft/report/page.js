// Sorting of tables, light and dark, and the timeline. No library; the data is in the page.
"use strict";

// --- light and dark: the system decides until someone does

(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const changed = () => document.dispatchEvent(new Event("themechange"));
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (system.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    changed();
  });
  system.addEventListener("change", changed);
})();

// --- tables

const valueOf = (cell) => (cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent.trim().toLowerCase());

const compare = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
};

const sortBy = (table, column) => {
  const heads = [...table.tHead.rows[0].cells];
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
  const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[column]), row]);
  rows.sort((a, b) => compare(a[0], b[0]) * (down ? -1 : 1));
  table.tBodies[0].append(...rows.map(([, row]) => row));
};

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, i) => head.querySelector("button").addEventListener("click", () => sortBy(table, i)));
}

// --- the timeline

const LANE = 24, GAP = 5, HEAD = 20, AXIS = 24, SHORTEST = 0.4; // pixels

const nice = (micro) => {
  const abs = Math.abs(micro);
  const [value, unit] = abs >= 1e6 ? [micro / 1e6, "s"] : abs >= 1e3 ? [micro / 1e3, "ms"] : [micro, "µs"];
  return `${Number(value.toPrecision(4))} ${unit}`;
};

const stepOf = (span, about) => {
  const raw = span / about, scale = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((s) => s * scale).find((s) => s >= raw);
};

class Timeline {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    this.tip = document.getElementById("tip");
    this.pointers = new Map();
    this.listen();
    this.show(0);
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  // Rows of one view: for each of predicted and measured its streams, events sorted by start.
  show(index) {
    const view = this.data.views[index];
    this.lanes = [];
    this.end = 0;
    for (const line of view.lines) {
      const lanes = line.streams.map((name) => ({ name, events: [] }));
      for (const [name, stream, cause, start, length] of line.rows) {
        lanes[stream].events.push({ name: line.names[name], cause: line.causes[cause], start, end: start + length });
        this.end = Math.max(this.end, start + length);
      }
      lanes.forEach((lane) => lane.events.sort((a, b) => a.start - b.start));
      this.lanes.push({ title: line.label }, ...lanes.filter((lane) => lane.events.length));
    }
    this.end = this.end || 1;
    this.from = 0;
    this.to = this.end;
    document.getElementById("view-note").textContent = view.note;
    const causes = new Set(view.lines.flatMap((line) => line.causes));
    document.getElementById("causes").replaceChildren(...[...causes].map((cause) => this.key(cause)));
    this.draw();
  }

  key(cause) {
    const span = document.createElement("span"), swatch = document.createElement("i");
    const [cls, means] = this.data.causes[cause];
    span.className = "key";
    swatch.className = `swatch ${cls}`;
    span.append(swatch, means);
    return span;
  }

  get left() {
    return this.canvas.clientWidth < 560 ? 76 : 118;
  }

  at(pixel) {
    return this.from + ((pixel - this.left) / (this.canvas.clientWidth - this.left)) * (this.to - this.from);
  }

  colours() {
    const probe = document.createElement("i"), found = {};
    document.body.append(probe);
    for (const cause of Object.keys(this.data.causes)) {
      probe.className = `swatch ${this.data.causes[cause][0]}`;
      found[cause] = getComputedStyle(probe).backgroundColor;
    }
    probe.remove();
    const style = getComputedStyle(document.documentElement);
    for (const name of ["fg", "muted", "line", "grid", "card", "soft"]) found[`--${name}`] = style.getPropertyValue(`--${name}`).trim();
    return found;
  }

  draw() {
    const { canvas } = this, width = canvas.clientWidth, scale = devicePixelRatio || 1;
    if (!width) return;
    const height = AXIS + this.lanes.reduce((sum, lane) => sum + (lane.title ? HEAD : LANE + GAP), 6);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d"), colour = this.colours();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(pen, colour, width, height);
    let y = AXIS;
    for (const lane of this.lanes) {
      if (lane.title) {
        pen.fillStyle = colour["--fg"];
        pen.font = "600 12px system-ui, sans-serif";
        pen.fillText(lane.title, 8, y + HEAD / 2 + 2);
        pen.font = "12px system-ui, sans-serif";
        y += HEAD;
        continue;
      }
      lane.y = y;
      this.drawLane(pen, colour, lane, width);
      y += LANE + GAP;
    }
    canvas.dataset.from = this.from;
    canvas.dataset.to = this.to;
    const shown = this.to - this.from >= this.end * 0.999 ? "the full step" : `${nice(this.from)} to ${nice(this.to)}`;
    document.getElementById("range").textContent = `Shown: ${shown}, ${nice(this.to - this.from)} wide.`;
  }

  drawAxis(pen, colour, width, height) {
    const room = width - this.left, step = stepOf(this.to - this.from, Math.max(3, room / 110));
    pen.textAlign = "center";
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = this.left + ((t - this.from) / (this.to - this.from)) * room;
      pen.fillStyle = colour["--grid"];
      pen.fillRect(x, AXIS - 4, 1, height - AXIS);
      pen.fillStyle = colour["--muted"];
      if (x > this.left + 18 && x < width - 22) pen.fillText(nice(t), x, AXIS / 2 - 1);
    }
    pen.textAlign = "left";
  }

  drawLane(pen, colour, lane, width) {
    const room = width - this.left, per = room / (this.to - this.from);
    pen.fillStyle = colour["--soft"];
    pen.fillRect(this.left, lane.y, room, LANE);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, lane.y, room, LANE);
    pen.clip();
    for (const event of lane.events) {
      if (event.start > this.to) break;
      if (event.end < this.from) continue;
      const x = this.left + (event.start - this.from) * per, wide = Math.max(SHORTEST, (event.end - event.start) * per);
      pen.fillStyle = colour[event.cause];
      pen.fillRect(x, lane.y, wide > 3 ? wide - 1 : wide, LANE);
      if (wide > 44) this.label(pen, event.name, Math.max(x, this.left) + 5, lane.y, x + wide);
    }
    pen.restore();
    pen.fillStyle = colour["--muted"];
    const name = this.fit(pen, lane.name.replace(/ to stage /, " → "), this.left - 22);
    pen.fillText(name, 14, lane.y + LANE / 2 + 1);
  }

  label(pen, text, x, y, until) {
    const said = this.fit(pen, text, until - x - 5);
    if (said.length < 3) return;
    pen.fillStyle = this.inkOn(pen.fillStyle);
    pen.fillText(said, x, y + LANE / 2 + 1);
  }

  inkOn(fill) {
    const mixed = fill.startsWith("color("); // a mix of two is given in shares of 1
    const hex = fill.startsWith("#") ? fill.slice(1).match(/../g).map((h) => parseInt(h, 16)) : fill.match(/[\d.]+/g).map((v) => Number(v) * (mixed ? 255 : 1));
    return hex[0] * 0.299 + hex[1] * 0.587 + hex[2] * 0.114 > 140 ? "#14161b" : "#ffffff";
  }

  fit(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    let n = Math.max(0, Math.floor(text.length * (room / pen.measureText(text).width)) - 1);
    return n > 0 ? `${text.slice(0, n)}…` : "";
  }

  // --- moving

  view(from, to) {
    const span = Math.min(this.end, Math.max(to - from, this.end / 1e5));
    this.from = Math.min(Math.max(0, from), this.end - span);
    this.to = this.from + span;
    this.hide();
    this.draw();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.view(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  move(share) {
    const by = (this.to - this.from) * share;
    this.view(this.from + by, this.to + by);
  }

  do(what) {
    const known = { in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.25), right: () => this.move(0.25), all: () => this.view(0, this.end) };
    known[what]();
  }

  listen() {
    const { canvas } = this;
    const keys = { "+": "in", "=": "in", "-": "out", "_": "out", ArrowLeft: "left", ArrowRight: "right", ArrowUp: "in", ArrowDown: "out", 0: "all", Home: "all" };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.do(keys[event.key]);
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / 800);
      else this.zoom(Math.exp(Math.max(-80, Math.min(80, event.deltaY)) / 240), this.at(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) canvas.addEventListener(end, (event) => this.release(event));
    document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", () => this.do(b.dataset.zoom)));
    document.querySelectorAll("[data-view]").forEach((b) => b.addEventListener("click", () => {
      document.querySelectorAll("[data-view]").forEach((other) => other.setAttribute("aria-selected", String(other === b)));
      this.show(Number(b.dataset.view));
    }));
    document.addEventListener("themechange", () => this.draw());
  }

  press(event) {
    this.pointers.set(event.pointerId, event.offsetX);
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.classList.add("dragging");
  }

  drag(event) {
    if (!this.pointers.has(event.pointerId)) return this.point(event);
    const room = this.canvas.clientWidth - this.left, before = [...this.pointers.values()];
    this.pointers.set(event.pointerId, event.offsetX);
    const now = [...this.pointers.values()];
    if (now.length === 1) {
      const by = ((before[0] - now[0]) / room) * (this.to - this.from);
      this.view(this.from + by, this.to + by);
    } else {
      const apart = (xs) => Math.max(8, Math.abs(xs[0] - xs[1]));
      this.zoom(apart(before) / apart(now), this.at((now[0] + now[1]) / 2));
    }
  }

  release(event) {
    this.pointers.delete(event.pointerId);
    if (!this.pointers.size) this.canvas.classList.remove("dragging");
    if (event.type === "pointerleave") this.hide();
  }

  // What lies under the pointer.
  point(event) {
    const lane = this.lanes.find((l) => l.events && event.offsetY >= l.y && event.offsetY < l.y + LANE);
    const t = this.at(event.offsetX), slack = ((this.to - this.from) / this.canvas.clientWidth) * 2;
    const found = lane && event.offsetX >= this.left && lane.events.findLast((e) => e.start - slack <= t && t <= e.end + slack);
    if (!found) return this.hide();
    this.tip.hidden = false;
    this.tip.textContent = `${found.name}: ${nice(found.end - found.start)}, from ${nice(found.start)} (${this.data.causes[found.cause][1]})`;
    const room = this.canvas.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(4, Math.min(room, event.offsetX + 12))}px`;
    this.tip.style.top = `${lane.y + LANE + 6}px`;
  }

  hide() {
    this.tip.hidden = true;
  }
}

(() => {
  const canvas = document.getElementById("timeline");
  if (canvas) window.timeline = new Timeline(canvas, JSON.parse(document.getElementById("data").textContent));
})();
