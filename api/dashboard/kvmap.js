// The map of the blocks that one answer was read from: one row per chunk, one cell per block. The data is the JSON of
// GET /v1/answers/{id}/map. Vue's interpolation shows all text as text.
const KINDS = { k: "kept", r: "recomputed", p: "pulled in later", d: "dropped" };
const ORDER = ["r", "k", "p", "d"]; // of the parts of a cell, from the bottom

export default {
  template: `
    <div class="kvmap" @keydown="move">
      <div class="legend" aria-hidden="true">
        <span v-for="kind in ORDER" :key="kind"><i :class="'swatch ' + kind"></i>{{ KINDS[kind] }}</span>
        <span><i class="swatch found">★</i>holds words of the answer</span>
      </div>
      <label class="layers">
        <span>{{ layer < 0 ? "all " + map.layers + " layers" : "layer " + (layer + 1) + " of " + map.layers }}</span>
        <input type="range" min="-1" :max="map.layers - 1" v-model.number="layer"
          aria-label="Layer" :aria-valuetext="layer < 0 ? 'all layers' : 'layer ' + (layer + 1)">
      </label>
      <div class="scroll">
        <table role="grid" :style="{ '--blocks': longest }" :aria-label="'What the model read: ' + map.chunks.length + ' chunks'">
          <tbody>
            <tr v-for="(chunk, row) in map.chunks" :key="chunk.chunk_id">
              <th scope="row" :title="chunk.chunk_id"><sup v-if="chunk.citation">{{ chunk.citation }}</sup> {{ chunk.title || chunk.document_id }}</th>
              <td v-for="(cell, column) in cells[row]" :key="column" role="gridcell" :ref="row + ':' + column"
                :tabindex="row === at[0] && column === at[1] ? 0 : -1" :aria-label="cell.said"
                :class="['cell', cell.kind, { found: cell.found, chosen: row === at[0] && column === at[1] }]"
                :style="cell.style" @mouseenter="choose(row, column)" @focus="choose(row, column)"
              >{{ cell.found ? "★" : "" }}</td>
            </tr>
          </tbody>
        </table>
      </div>
      <figure v-if="shown" class="block">
        <figcaption>{{ shown.said }}</figcaption>
        <div class="strip" aria-hidden="true"><i v-for="(kind, n) in shown.layers" :key="n" :class="'swatch ' + kind" :title="'layer ' + (n + 1)"></i></div>
        <pre>{{ shown.text === null ? "This chunk is no longer there." : shown.text }}</pre>
      </figure>
    </div>`,
  props: { map: { type: Object, required: true } },
  data: () => ({ layer: -1, at: [0, 0], KINDS, ORDER }),
  watch: {
    map() {
      this.layer = -1;
      this.at = [0, 0];
    },
  },
  computed: {
    cells() {
      return this.map.chunks.map((chunk) =>
        Array.from(chunk.states[0] || "", (_, block) => this.cell(chunk, block)),
      );
    },
    longest() {
      return Math.max(1, ...this.cells.map((row) => row.length));
    },
    shown() {
      const chunk = this.map.chunks[this.at[0]];
      const cell = chunk && this.cells[this.at[0]][this.at[1]];
      if (!cell) return null;
      const text = chunk.texts ? chunk.texts[this.at[1]] : null;
      return { said: cell.said, layers: chunk.states.map((states) => states[this.at[1]]), text };
    },
  },
  methods: {
    cell(chunk, block) {
      const layers = this.layer < 0 ? chunk.states : [chunk.states[this.layer]];
      const shares = Object.fromEntries(ORDER.map((kind) => [kind, 0]));
      for (const states of layers) shares[states[block]] += 1 / layers.length;
      const parts = ORDER.filter((kind) => shares[kind] > 0);
      const described = parts.map((kind) => KINDS[kind] + (parts.length > 1 ? " " + Math.round(100 * shares[kind]) + "%" : ""));
      const found = (chunk.holds_answer || []).includes(block);
      return {
        kind: parts.length === 1 ? parts[0] : "mixed",
        style: parts.length === 1 ? {} : { backgroundImage: this.stack(shares) },
        found,
        said: `${chunk.citation ? "[" + chunk.citation + "] " : ""}block ${block + 1} of ${chunk.states[0].length}: ${described.join(", ")}` + (found ? "; holds words of the answer" : ""),
      };
    },
    stack(shares) {
      let from = 0;
      const stops = ORDER.map((kind) => {
        const to = from + 100 * shares[kind];
        const stop = `var(--${KINDS[kind].split(" ")[0]}) ${from}% ${to}%`;
        from = to;
        return stop;
      });
      return `linear-gradient(to top, ${stops.join(", ")})`;
    },
    choose(row, column) {
      this.at = [row, column];
    },
    move(event) {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
      if (!step || event.target.tagName === "INPUT") return;
      event.preventDefault();
      const row = Math.min(Math.max(this.at[0] + step[0], 0), this.cells.length - 1);
      const column = Math.min(Math.max(this.at[1] + step[1], 0), this.cells[row].length - 1);
      this.choose(row, column);
      this.$nextTick(() => this.$refs[row + ":" + column][0].focus());
    },
  },
};
