package openapi

import (
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
)

// Media types of OpenAPI documents in protobuf, in the two spellings that clients use.
var (
	protoV2 = []string{"application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
		"application/com.github.proto-openapi.spec.v2.v1.0+protobuf"}
	protoV3 = []string{"application/com.github.proto-openapi.spec.v3@v1.0+protobuf",
		"application/com.github.proto-openapi.spec.v3.v1.0+protobuf"}
)

// format is part of the hash of every document. Increment it when documents are served with
// different headers or media types, so that clients do not use cached responses with the old ones.
const format = "5"

const title = "Keelson"

// freeAfter is the number of bytes of new pieces after which unused memory is returned to the
// operating system. Generating documents is rare and temporarily needs much memory.
const freeAfter = 1 << 20

// Spec serves the OpenAPI documents of a table of kinds. It is safe for concurrent use.
type Spec struct {
	kinds   *api.Kinds
	info    []byte        // the info section in JSON
	slots   chan struct{} // limits the pieces that are generated concurrently
	written atomic.Int64  // bytes of new pieces since unused memory was last returned

	mu    sync.Mutex
	table *api.Table // the table for which documents were generated
	// by name: "v2", "v2.pb", "v2+" (merged), "v3/apis/apps/v1", "v3/apis/apps/v1.pb"
	documents    map[string]*pendingValue[*entry]
	topics       map[string][]topic                   // topics of each document in documents
	index        map[*api.Table]*pendingValue[[]byte] // the v3 index of the table
	descriptions map[topicKey]*pendingValue[*description]
	definitions  map[typesKey]*pendingValue[*piece]

	parts    []*Part // parts of other API servers in the merged document
	partsKey string
}

// entry is a generated OpenAPI document with its checksum and hash.
type entry struct {
	text sequence
	crc  uint32
	hash string
}

// dropOutdated removes the cached documents and pieces that a change of the kinds has made invalid.
// The caller holds mu.
func (s *Spec) dropOutdated() {
	t := s.kinds.Table()
	if t == s.table {
		return
	}
	s.table = t
	clear(s.index)
	for doc := range s.documents {
		if !slices.Equal(s.topics[doc], describedBy(t, doc)) {
			s.dropDocument(doc)
		}
	}
	for key := range s.descriptions {
		if key.kind != nil && !t.Has(key.kind) {
			delete(s.descriptions, key)
		}
	}
}

// dropDocument removes a cached document. Goroutines that already wait for the document still
// receive it. The caller holds mu.
func (s *Spec) dropDocument(doc string) {
	delete(s.documents, doc)
	delete(s.topics, doc)
}

// New returns a Spec for the kinds. version is the version of the API in the info section.
// Documents are generated at their first request.
func New(kinds *api.Kinds, version string) *Spec {
	info, err := json.Marshal(object{"title": title, "version": version})
	if err != nil {
		panic(err) // two strings always encode
	}
	return &Spec{
		kinds: kinds, info: info, slots: make(chan struct{}, max(2, runtime.GOMAXPROCS(0))),
		documents: map[string]*pendingValue[*entry]{}, topics: map[string][]topic{},
		index:        map[*api.Table]*pendingValue[[]byte]{},
		descriptions: map[topicKey]*pendingValue[*description]{}, definitions: map[typesKey]*pendingValue[*piece]{},
	}
}

// Serve serves /openapi/v2, /openapi/v3 and the documents below it. It returns false if r has
// another path.
func (s *Spec) Serve(w http.ResponseWriter, r *http.Request) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	switch {
	case path == "/openapi/v2":
		s.serveDocument(w, r, "v2", protoV2)
	case path == "/openapi/v3":
		data, err := s.writeIndex()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return true
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(data)
	case strings.HasPrefix(path, "/openapi/v3/") && len(describedBy(s.kinds.Table(), path[len("/openapi/"):])) > 0:
		s.serveDocument(w, r, path[len("/openapi/"):], protoV3)
	default:
		return false
	}
	return true
}

// documentRoot returns the document path of a kind's group version: "api/v1", "apis/apps/v1".
func documentRoot(k *api.Kind) string { return rootOf(k.GVK.GroupVersion()) }

func rootOf(gv schema.GroupVersion) string {
	if gv.Group == "" {
		return "api/" + gv.Version
	}
	return "apis/" + gv.String()
}

// ServeIndex serves /openapi/v3, the index of v3 documents. elsewhere contains the URLs of
// documents of other servers, by document path. They replace this server's documents with the same
// path.
func (s *Spec) ServeIndex(w http.ResponseWriter, elsewhere map[string]string) {
	data, err := s.writeIndex()
	var index struct {
		Paths map[string]object `json:"paths"`
	}
	if err == nil {
		err = json.Unmarshal(data, &index)
	}
	for where, url := range elsewhere {
		index.Paths[where] = object{"serverRelativeURL": url}
	}
	if err == nil {
		data, err = json.Marshal(index)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(data)
}

// writeIndex returns the v3 index in JSON: the URL of each document with the hash of its content.
func (s *Spec) writeIndex() ([]byte, error) {
	s.mu.Lock()
	s.dropOutdated()
	t := s.table
	m, mine := beginMaking(s.index, t)
	s.mu.Unlock()
	if mine {
		finishMaking(s, s.index, t, m, func() ([]byte, error) { return s.indexOf(t) })
		s.freeMemory()
	}
	<-m.done
	return m.value, m.err
}

func (s *Spec) indexOf(t *api.Table) ([]byte, error) {
	list := object{}
	for _, x := range topicsOf(t) {
		where := x.documentRoot()
		if list[where] != nil {
			continue
		}
		e, err := s.documentFor("v3/" + where)
		if err != nil {
			return nil, err
		}
		list[where] = object{"serverRelativeURL": "/openapi/v3/" + where + "?hash=" + e.hash}
	}
	return json.Marshal(object{"paths": list})
}

// documentFor returns a document, which is generated at its first request. Callers wait only for
// the document that they request.
func (s *Spec) documentFor(doc string) (*entry, error) {
	s.mu.Lock()
	s.dropOutdated()
	m, mine := beginMaking(s.documents, doc)
	parts := s.parts
	if mine {
		s.topics[doc] = describedBy(s.table, doc)
	}
	of := s.topics[doc]
	s.mu.Unlock()
	if mine {
		finishMaking(s, s.documents, doc, m, func() (*entry, error) {
			e, err := s.generateDocument(doc, of, parts)
			if err != nil {
				return nil, fmt.Errorf("generating the OpenAPI document %s: %w", doc, err)
			}
			return e, nil
		})
	}
	<-m.done
	return m.value, m.err
}

// generateDocument generates a document from the pieces of its topics. parts are included in the
// merged v2 document only.
func (s *Spec) generateDocument(doc string, topics []topic, parts []*Part) (*entry, error) {
	f := form{v3: strings.HasPrefix(doc, "v3/"), proto: strings.HasSuffix(doc, ".pb")}
	x, err := s.gatherSections(topics, f)
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(doc, mergedV2) {
		if err := s.mergeParts(x, topics, parts, f); err != nil {
			return nil, err
		}
	}
	e := &entry{text: x.asJSONDocument(f.v3, s.info)}
	if f.proto {
		if e.text, err = x.inProto(f.v3, s.info); err != nil {
			return nil, err
		}
	}
	sum := sha512.New()
	fmt.Fprintf(sum, "format %s of %s\n", format, doc)
	for _, p := range e.text {
		_, _ = sum.Write(p.sum[:])
	}
	e.crc = e.text.checksum()
	e.hash = strings.ToUpper(hex.EncodeToString(sum.Sum(nil)))
	return e, nil
}

// freeMemory returns unused memory to the operating system after large documents were generated.
func (s *Spec) freeMemory() {
	if n := s.written.Load(); n > freeAfter && s.written.CompareAndSwap(n, 0) {
		go debug.FreeOSMemory()
	}
}

func (s *Spec) serveDocument(w http.ResponseWriter, r *http.Request, doc string, protoTypes []string) {
	media := "application/json"
	if accept := r.Header.Get("Accept"); !strings.Contains(accept, "application/json") {
		for _, t := range protoTypes {
			if strings.Contains(accept, t) {
				// clients request the spelling with "@", which is invalid in a Content-Type
				media, doc = protoTypes[1], doc+".pb"
				break
			}
		}
	}
	asked := r.URL.Query().Get("hash")
	e, err := s.documentFor(doc)
	inIndex := e // the index has the hash of the JSON document
	if plain := strings.TrimSuffix(doc, ".pb"); err == nil && plain != doc && asked != "" {
		inIndex, err = s.documentFor(plain)
	}
	s.freeMemory()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("ETag", `"`+e.hash+`"`)
	h.Add("Vary", "Accept-Encoding")
	h.Add("Vary", "Accept")
	if asked != "" {
		if asked != inIndex.hash {
			u := *r.URL
			u.RawQuery = "hash=" + inIndex.hash
			http.Redirect(w, r, u.String(), http.StatusMovedPermanently)
			return
		}
		h.Set("Cache-Control", "public, immutable")
		// Without Expires, caches such as that of kubectl ignore "immutable" and repeat the request
		// each time.
		h.Set("Expires", time.Now().AddDate(1, 0, 0).UTC().Format(http.TimeFormat))
	}
	if strings.Contains(r.Header.Get("If-None-Match"), e.hash) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", media)
	if endpoints.AcceptsGzip(r) {
		h.Set("Content-Encoding", "gzip")
		h.Set("Content-Length", strconv.FormatInt(e.text.zippedSize(), 10))
		_ = e.text.writeZipped(w, e.crc)
		return
	}
	if err := e.text.writePlain(w); err != nil {
		panic(http.ErrAbortHandler)
	}
}
