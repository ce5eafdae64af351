// The documents of a collection as a table, on a narrow page as a list. A click on a heading sorts, on a title opens the
// document. Vue's interpolation shows all text as text.
const UNSORTED = ["status", "kv", "saves"];
const COLUMNS = [
  ["title", "Document"], ["status", "Status"], ["chunks", "Chunks"], ["tokens", "Tokens"], ["bytes", "Text"], ["kv", "KV before → after"],
  ["saves", "A question saves"], ["updated", "Stored"],
];

export default {
  template: `
    <div class="documents">
      <div class="actions" role="toolbar" aria-label="Actions" v-if="editable">
        <label><input type="checkbox" :checked="all" :indeterminate.prop="some && !all" :disabled="!rows.length" @change="chooseAll"> All on this page</label>
        <span class="note" aria-live="polite">{{ chosen.length ? chosen.length + " chosen" : "Choose documents to delete them, or to ingest them again." }}</span>
        <button type="button" class="act" v-if="some" @click="$emit('remove', chosen)">Delete</button>
        <button type="button" class="act" v-if="some" @click="again">Ingest again</button>
        <button type="button" class="act" v-if="some" @click="chosen = []">Choose none</button>
      </div>
      <table>
        <thead><tr><th scope="col"><span class="hidden">Choose</span></th>
          <th v-for="[name, label] in columns" :key="name" scope="col" :class="'of-' + name"
            :aria-sort="name !== sort ? null : descending ? 'descending' : 'ascending'">
            <button type="button" v-if="!UNSORTED.includes(name)" @click="$emit('sort', name)">{{ label }}<span aria-hidden="true">{{ name !== sort ? "" : descending ? " ↓" : " ↑" }}</span></button>
            <template v-else>{{ label }}</template>
          </th></tr></thead>
        <tbody>
          <tr v-for="row in rows" :key="row.status + row.id" :class="{ chosen: chosen.includes(row.id) }">
            <td class="of-choose"><input type="checkbox" :aria-label="'Choose ' + row.title" :value="row.id" v-model="chosen" :disabled="!editable"></td>
            <td class="of-title"><button type="button" class="link" v-if="row.stored" @click="$emit('open', row.id)">{{ row.title }}</button><b v-else>{{ row.title }}</b>
              <small v-if="row.id !== row.title">{{ row.id }}</small>
              <span v-for="tag in row.tags" :key="tag" class="tag">{{ tag }}</span></td>
            <td class="of-status"><span :class="'state ' + row.status">{{ row.status }}</span><small v-if="row.reason" class="fault">{{ row.reason }}</small></td>
            <td v-for="name in ['chunks', 'tokens', 'bytes', 'kv', 'saves']" :key="name" :class="'of-' + name" :data-label="labels[name]">{{ row.stored ? row[name] : "" }}</td>
            <td class="of-updated" data-label="Stored">{{ row.stored ? new Date(1000 * row.updated).toLocaleString() : "" }}</td>
          </tr>
        </tbody>
      </table>
      <p v-if="!rows.length" class="note empty">{{ empty }}</p>
    </div>`,
  props: {
    rows: { type: Array, default: () => [] },
    sort: { type: String, default: "title" },
    descending: { type: Boolean, default: false },
    empty: { type: String, default: "" },
    editable: { type: Boolean, default: true },
  },
  emits: ["sort", "open", "remove", "again"],
  data: () => ({ chosen: [], columns: COLUMNS, UNSORTED, labels: Object.fromEntries(COLUMNS) }),
  watch: {
    rows() {
      const shown = new Set(this.rows.map((row) => row.id));
      this.chosen = this.chosen.filter((id) => shown.has(id));
    },
  },
  computed: {
    some() {
      return this.chosen.length > 0;
    },
    all() {
      return this.rows.length > 0 && this.rows.every((row) => this.chosen.includes(row.id));
    },
  },
  methods: {
    again() {
      this.$emit("again", this.chosen);
      this.chosen = [];
    },
    chooseAll(event) {
      this.chosen = event.target.checked ? [...new Set(this.rows.map((row) => row.id))] : [];
    },
  },
};
