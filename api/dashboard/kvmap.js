// The map of the blocks that one answer was read from: one row per chunk, one cell per block, and below them the whole
// passage of the chosen block. The data is the JSON of GET /v1/answers/{id}/map, and one line a chunk that says where it
// stands. Vue's interpolation shows all text as text.
const KINDS = { k: "kept", r: "recomputed", p: "pulled in later", d: "dropped" };
const TERMS = {
  k: "The model read the KV that was stored at ingest.",
  r: "At least some tokens of the block were computed again.",
  p: "Left out at first, and fetched while the answer was written.",
  d: "The model did not read this block.",
};
const ORDER = ["r", "k", "p", "d"]; // of the parts of a cell, from the bottom

export default {
  template: `
    <div class="kvmap" @keydown="move">
      <ul class="legend">
        <li v-for="kind in ORDER" :key="kind" :title="TERMS[kind]"><i :class="'swatch ' + kind" aria-hidden="true"></i>{{ KINDS[kind] }}</li>
        <li title="The words of the answer stand in this block."><i class="swatch found" aria-hidden="true">★</i>holds words of the answer</li>
      </ul>
      <label class="layers">
        <span>{{ layer < 0 ? "all " + map.layers + " layers" : "layer " + (layer + 1) + " of " + map.layers }}</span>
        <input type="range" min="-1" :max="map.layers - 1" v-model.number="layer"
          aria-label="Layer" :aria-valuetext="layer < 0 ? 'all layers' : 'layer ' + (layer + 1)">
      </label>
      <div role="grid" class="rows" :style="{ '--blocks': longest }" :aria-label="'What the model read: ' + map.chunks.length + ' chunks'">
        <div role="row" class="line-of-blocks" v-for="(chunk, row) in map.chunks" :key="chunk.chunk_id">
          <div role="rowheader" class="whose" :title="chunk.chunk_id">
            <b><span v-if="chunk.citation" class="number">{{ chunk.citation }}</span>{{ chunk.title || chunk.document_id }}</b>
            <small>{{ places[row] }}</small>
          </div>
          <div class="blocks" role="presentation">
            <div v-for="(cell, column) in cells[row]" :key="column" role="gridcell" :ref="row + ':' + column"
              :tabindex="row === at[0] && column === at[1] ? 0 : -1" :aria-label="cell.said" :title="cell.said"
              :aria-selected="row === at[0] && column === at[1]"
              :class="['cell', cell.kind, { found: cell.found, chosen: row === at[0] && column === at[1] }]"
              :style="cell.style" @click="choose(row, column)" @focus="choose(row, column)"
            >{{ cell.found ? "★" : "" }}</div>
          </div>
        </div>
      </div>
      <figure v-if="shown" class="block">
        <figcaption>{{ shown.said }}</figcaption>
        <div class="strip" aria-hidden="true"><i v-for="(kind, n) in shown.layers" :key="n" :class="'swatch ' + kind" :title="'layer ' + (n + 1)"></i></div>
        <pre v-if="shown.texts" ref="passage" tabindex="0" aria-label="Passage"><component v-for="(text, n) in shown.texts" :key="n"
          :is="n === at[1] ? 'mark' : 'span'" @click="choose(at[0], n)">{{ text }}</component></pre>
        <p v-else class="note">This chunk is no longer there.</p>
      </figure>
    </div>`,
  props: { map: { type: Object, required: true }, places: { type: Array, required: true } },
  data: () => ({ layer: -1, at: [0, 0], KINDS, TERMS, ORDER }),
  created() {
    this.at = this.first();
  },
  mounted() {
    this.reveal();
  },
  watch: {
    map() {
      this.layer = -1;
      this.choose(...this.first());
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
      return { said: cell.said, layers: chunk.states.map((states) => states[this.at[1]]), texts: chunk.texts };
    },
  },
  methods: {
    first() {
      // The first block that holds words of the answer; without one, the first that was read.
      const chunks = this.map.chunks;
      const row = chunks.findIndex((chunk) => chunk.holds_answer.length);
      if (row >= 0) return [row, chunks[row].holds_answer[0]];
      const read = chunks.findIndex((chunk) => /[krp]/.test(chunk.states[0] || ""));
      return read < 0 ? [0, 0] : [read, chunks[read].states[0].search(/[krp]/)];
    },
    cell(chunk, block) {
      const layers = this.layer < 0 ? chunk.states : [chunk.states[this.layer]];
      const shares = Object.fromEntries(ORDER.map((kind) => [kind, 0]));
      for (const states of layers) shares[states[block]] += 1 / layers.length;
      const parts = ORDER.filter((kind) => shares[kind] > 0);
      const described = parts.map((kind) => KINDS[kind] + (parts.length > 1 ? " " + Math.round(100 * shares[kind]) + "%" : ""));
      const found = chunk.holds_answer.includes(block);
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
      this.$nextTick(this.reveal);
    },
    reveal() {
      // Scrolls the passage, and only the passage, to the chosen block.
      const passage = this.$refs.passage, mark = passage && passage.querySelector("mark");
      if (mark) passage.scrollTop += mark.getBoundingClientRect().top - passage.getBoundingClientRect().top - passage.clientHeight / 3;
    },
    move(event) {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
      if (!step || event.target.getAttribute("role") !== "gridcell") return;
      event.preventDefault();
      const row = Math.min(Math.max(this.at[0] + step[0], 0), this.cells.length - 1);
      const column = Math.min(Math.max(this.at[1] + step[1], 0), this.cells[row].length - 1);
      this.choose(row, column);
      this.$nextTick(() => this.$refs[row + ":" + column][0].focus());
    },
  },
};
