// Files are dropped or chosen here, sent to POST /v1/documents, and followed until they are ingested. Each file shows its
// progress, or why it was refused. Vue's interpolation shows all text as text.
const MOST = 500; // files of one request; the service takes 1000 documents, and a file may hold several
const UPLOAD = 0.3; // share of the progress bar for sending
const SECONDS = 1; // between two looks at a job

export default {
  template: `
    <div class="dropzone">
      <div :class="['drop', { over }]" @dragenter.prevent="over = true" @dragover.prevent="over = true" @dragleave.prevent="over = false" @drop.prevent="drop">
        <p><button type="button" class="link" @click="$refs.input.click()">Choose files</button> or drop them here</p>
        <small>{{ formats }}, up to {{ size(limit) }} each</small>
        <input ref="input" type="file" multiple hidden aria-label="Files" @change="take($event.target.files); $event.target.value = ''">
      </div>
      <ul v-if="files.length" class="files" aria-label="Files" aria-live="polite">
        <li v-for="file in files" :key="file.key">
          <b>{{ file.name }}</b> <small>{{ size(file.size) }}</small>
          <span :class="file.reason ? 'fault' : 'note'">{{ file.reason || file.state }}</span>
          <progress v-if="!file.reason" max="1" :value="file.share" :aria-label="'Progress of ' + file.name"></progress>
        </li>
        <li v-if="!running"><button type="button" class="link" @click="files = []">Clear the list</button></li>
      </ul>
    </div>`,
  props: {
    collection: { type: String, required: true },
    limit: { type: Number, required: true }, // bytes of a file
    formats: { type: String, required: true }, // what can be read
    together: { type: Number, required: true }, // bytes of the files of one request
  },
  emits: ["sent"],
  data: () => ({ over: false, files: [], made: 0, gone: false }),
  computed: {
    running() {
      return this.files.some((file) => !file.ended);
    },
  },
  unmounted() {
    this.gone = true;
  },
  methods: {
    size(bytes) {
      return bytes < 1024 ? bytes + " B" : bytes < 2 ** 20 ? Math.round(bytes / 1024) + " KiB" : (bytes / 2 ** 20).toFixed(1) + " MiB";
    },
    drop(event) {
      this.over = false;
      this.take(event.dataTransfer.files);
    },
    async take(chosen) {
      const collection = this.collection, parts = [];
      for (const content of chosen) {
        const file = { key: ++this.made, name: content.name, size: content.size, share: 0, state: "waiting", reason: "", ended: false };
        this.files.unshift(file);
        const shown = this.files[0]; // the reactive one
        if (content.size > this.limit) this.refuse([{ shown }], "larger than " + this.size(this.limit));
        else {
          const last = parts[parts.length - 1];
          if (last && last.length < MOST && last.reduce((sum, one) => sum + one.content.size, content.size) <= this.together) last.push({ shown, content });
          else parts.push([{ shown, content }]);
        }
      }
      for (const part of parts) await this.send(part, collection);
    },
    refuse(part, reason) {
      for (const { shown } of part) Object.assign(shown, { reason, ended: true });
    },
    send(part, collection) {
      return new Promise((resolve) => {
        const form = new FormData(), request = new XMLHttpRequest();
        form.append("collection", collection);
        for (const { content } of part) form.append("files", content, content.name);
        request.upload.onprogress = (event) => this.sending(part, event.loaded, event.total);
        request.onload = () => {
          const body = this.read(request.responseText);
          if (request.status >= 300) this.refuse(part, body.detail || "refused with status " + request.status);
          else {
            this.$emit("sent", body.job_id);
            this.follow(part, body.job_id);
          }
          resolve();
        };
        request.onerror = () => {
          this.refuse(part, "the connection broke; check that the service is running");
          resolve();
        };
        request.open("POST", "/v1/documents");
        request.send(form);
      });
    },
    sending(part, loaded, total) {
      // Files are sent one after another, so what was sent belongs to the first ones.
      const bytes = part.reduce((sum, { content }) => sum + content.size, 0);
      let before = Math.max(0, loaded - (total - bytes));
      for (const { shown, content } of part) {
        const share = content.size ? Math.min(1, Math.max(0, before / content.size)) : 1;
        Object.assign(shown, { share: UPLOAD * share, state: share < 1 ? "sending, " + Math.round(100 * share) + "%" : "sent" });
        before -= content.size;
      }
    },
    async follow(part, id) {
      let job = null;
      do {
        await new Promise((resolve) => setTimeout(resolve, 1000 * SECONDS));
        const response = await fetch("/v1/jobs/" + encodeURIComponent(id) + "?documents=all").catch(() => null);
        if (!response) continue;
        if (response.ok) this.update(part, (job = await response.json()));
        else return this.refuse(part, "its job can no longer be read");
      } while (!this.gone && !(job && job.finished));
    },
    update(part, job) {
      const names = part.map(({ shown }) => shown.name);
      for (const { shown } of part) {
        const own = this.entries(job.documents, shown.name, names), failed = own.filter((each) => each.status === "failed");
        const over = job.finished || (own.length && own.every((each) => !["queued", "running"].includes(each.status)));
        if (over && failed.length) {
          const message = failed[0].error ? failed[0].error.message : "failed";
          Object.assign(shown, { reason: own.length > 1 ? `${failed.length} of ${own.length} documents failed: ${message}` : message, ended: true });
        } else if (over) {
          const state = ["cancelled", "unchanged"].find((status) => own.some((each) => each.status === status));
          Object.assign(shown, { share: 1, state: state || "done", ended: true });
        } else if (own.some((each) => each.status === "running"))
          Object.assign(shown, { share: UPLOAD + (1 - UPLOAD) * (job.total ? job.done / job.total : 0), state: "ingesting" + (job.stage ? ": " + job.stage : "") });
        else Object.assign(shown, { share: UPLOAD, state: "waiting to be ingested" });
      }
    },
    entries(documents, name, names) {
      // Most files are one document with the file's name as its id. The ids of JSON lines are their own.
      const exact = documents.filter((each) => each.id === name);
      return exact.length ? exact : documents.filter((each) => !names.includes(each.id));
    },
    read(text) {
      try {
        return JSON.parse(text) || {};
      } catch {
        return {};
      }
    },
  },
};
