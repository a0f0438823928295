package openapi

import (
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	openapi_v3 "github.com/google/gnostic-models/openapiv3"
	"google.golang.org/protobuf/proto"

	"keelson.dev/keelson/controlplane/api"
)

// The media types of the protobuf forms, as clients of different ages spell them.
var (
	protoV2 = []string{"application/com.github.proto-openapi.spec.v2@v1.0+protobuf", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"}
	protoV3 = []string{"application/com.github.proto-openapi.spec.v3@v1.0+protobuf", "application/com.github.proto-openapi.spec.v3.v1.0+protobuf"}
)

// format is part of every hash. It advances when the same document is answered in
// other words (headers, media types): a client's cache must not take its old answer for the new one.
const format = "2"

// Spec serves the documents of a table of kinds. It is safe for concurrent use.
type Spec struct {
	kinds   *api.Kinds
	version string

	mu    sync.Mutex
	made  map[string]*entry // by document: "v2", "v2.pb", "v3/apis/apps/v1", "v3/apis/apps/v1.pb"
	index []byte
}

// entry is one document, compressed.
type entry struct {
	zipped []byte
	hash   string
}

// New returns a spec; nothing is made until it is asked for.
func New(kinds *api.Kinds, version string) *Spec {
	return &Spec{kinds: kinds, version: version, made: map[string]*entry{}}
}

// Serve answers /openapi/v2, /openapi/v3 and what is below; false for other paths.
func (s *Spec) Serve(w http.ResponseWriter, r *http.Request) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	switch {
	case path == "/openapi/v2":
		s.serve(w, r, "v2", protoV2)
	case path == "/openapi/v3":
		data, err := s.paths()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return true
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(data)
	case strings.HasPrefix(path, "/openapi/v3/") && len(s.kindsOf(path[len("/openapi/v3/"):])) > 0:
		s.serve(w, r, path[len("/openapi/"):], protoV3)
	default:
		return false
	}
	return true
}

// root is the place of a kind's group version: "api/v1", "apis/apps/v1".
func root(k *api.Kind) string {
	if k.GVK.Group == "" {
		return "api/" + k.GVK.Version
	}
	return "apis/" + k.GVK.GroupVersion().String()
}

func (s *Spec) kindsOf(where string) []*api.Kind {
	var out []*api.Kind
	for _, k := range s.kinds.All() {
		if root(k) == where {
			out = append(out, k)
		}
	}
	return out
}

// paths is the index of the v3 documents, each with the hash of its contents.
func (s *Spec) paths() ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.index != nil {
		return s.index, nil
	}
	list := object{}
	for _, k := range s.kinds.All() {
		where := root(k)
		if list[where] != nil {
			continue
		}
		e, err := s.entry("v3/" + where)
		if err != nil {
			return nil, err
		}
		list[where] = object{"serverRelativeURL": "/openapi/v3/" + where + "?hash=" + e.hash}
	}
	var err error
	s.index, err = json.Marshal(object{"paths": list})
	debug.FreeOSMemory() // the documents were large and are rarely needed again
	return s.index, err
}

// entry returns a document, making it when it is new. The caller holds mu.
func (s *Spec) entry(doc string) (*entry, error) {
	if e := s.made[doc]; e != nil {
		return e, nil
	}
	data, err := s.make(doc)
	if err != nil {
		return nil, fmt.Errorf("making the OpenAPI document %s: %w", doc, err)
	}
	var buf bytes.Buffer
	zip := gzip.NewWriter(&buf)
	if _, err := zip.Write(data); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	sum := sha512.New()
	fmt.Fprintf(sum, "format %s of %s\n", format, doc)
	_, _ = sum.Write(data)
	e := &entry{zipped: slices.Clip(buf.Bytes()), hash: strings.ToUpper(hex.EncodeToString(sum.Sum(nil)))}
	s.made[doc] = e
	return e, nil
}

// make builds a document. The protobuf forms are made from the JSON ones.
func (s *Spec) make(doc string) ([]byte, error) {
	plain, isProto := strings.CutSuffix(doc, ".pb")
	where, v3 := strings.CutPrefix(plain, "v3/")
	d := &document{schemas: newSchemas(v3), paths: object{}}
	list := s.kinds.All()
	if v3 {
		list = s.kindsOf(where)
	}
	for _, k := range list {
		d.add(k)
	}
	out := object{"paths": d.paths, "info": object{"title": "Keelson", "version": s.version}}
	if v3 {
		out["openapi"], out["components"] = "3.0.0", object{"schemas": d.defs}
	} else {
		out["swagger"], out["definitions"] = "2.0", d.defs
	}
	data, err := json.Marshal(out)
	if err != nil || !isProto {
		return data, err
	}
	var msg proto.Message
	if v3 {
		msg, err = openapi_v3.ParseDocument(data)
	} else {
		msg, err = openapi_v2.ParseDocument(data)
	}
	if err != nil {
		return nil, err
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(msg) // replicas must agree on the hash
}

func (s *Spec) serve(w http.ResponseWriter, r *http.Request, doc string, protoTypes []string) {
	media := "application/json"
	if accept := r.Header.Get("Accept"); !strings.Contains(accept, "application/json") {
		for _, t := range protoTypes {
			if strings.Contains(accept, t) {
				media, doc = protoTypes[1], doc+".pb" // "@" is asked for but may not stand in an answer
				break
			}
		}
	}
	asked := r.URL.Query().Get("hash")
	s.mu.Lock()
	fresh := s.made[doc] == nil
	e, err := s.entry(doc)
	inIndex := e // the index names a document by the hash of its JSON form
	if plain := strings.TrimSuffix(doc, ".pb"); err == nil && plain != doc && asked != "" {
		inIndex, err = s.entry(plain)
	}
	s.mu.Unlock()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if fresh {
		go debug.FreeOSMemory()
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
	}
	if strings.Contains(r.Header.Get("If-None-Match"), e.hash) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", media)
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		_, _ = w.Write(e.zipped)
		return
	}
	zip, err := gzip.NewReader(bytes.NewReader(e.zipped))
	if err == nil {
		_, err = io.Copy(w, zip)
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}
