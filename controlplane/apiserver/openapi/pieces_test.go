package openapi

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	openapi_v3 "github.com/google/gnostic-models/openapiv3"
	"google.golang.org/protobuf/proto"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// widget registers a kind with a schema of its own, in a group of its own.
func widget(t testing.TB, all *api.Kinds, i int, model func(v3 bool) (map[string]any, error)) *api.Kind {
	t.Helper()
	n := strconv.Itoa(i)
	r := custom.Resource{Group: "g" + n + ".example.com", Kind: "Widget" + n, Plural: "widgets" + n,
		Singular: "widget" + n, Namespaced: true}
	k := custom.NewKind(r, "v1", true, custom.NewStorage(r, "v1"))
	k.Schema.Model = model
	if err := all.Register(k); err != nil {
		t.Fatal(err)
	}
	return k
}

func twentyFields(bool) (map[string]any, error) {
	fields := object{}
	for i := range 20 {
		fields["field"+strconv.Itoa(i)] = object{
			"type": "number", "format": "int32", "description": fmt.Sprintf("What a <%d> & a \u2028 are for.", i),
			"default": 1.5, "x-kubernetes-yes": true, "enum": []any{1, 1.5, "true", nil, true},
		}
	}
	return object{"type": "object", "properties": fields}, nil
}

// Whatever the pieces are, a document is one gzip stream, as long as it says, and its protobuf form
// says what the library makes of its JSON form.
func TestDocumentsOfPieces(t *testing.T) {
	all := kinds.All()
	widget(t, all, 0, twentyFields)
	s := New(all, "test")
	part, err := NewPart([]byte(other), wardle)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/openapi/v2", "/openapi/v2 merged", "/openapi/v3/api/v1",
		"/openapi/v3/apis/g0.example.com/v1"} {
		path, merged := strings.CutSuffix(path, " merged")
		var doc []byte
		for _, accept := range []string{"application/json", protoV2[0] + "," + protoV3[0]} {
			answer := func(encoding string) *httptest.ResponseRecorder {
				r := httptest.NewRequest("GET", path, nil)
				r.Header.Set("Accept", accept)
				r.Header.Set("Accept-Encoding", encoding)
				w := httptest.NewRecorder()
				if merged {
					s.ServeMerged(w, r, []*Part{part})
				} else {
					s.Serve(w, r)
				}
				return w
			}
			plain, zipped := answer("").Body.Bytes(), answer("gzip")
			if got := zipped.Header().Get("Content-Length"); got != strconv.Itoa(zipped.Body.Len()) {
				t.Errorf("%s as %s says that it has %s bytes, of %d", path, accept, got, zipped.Body.Len())
			}
			zip, err := gzip.NewReader(zipped.Body)
			if err != nil {
				t.Fatal(err)
			}
			zip.Multistream(false)
			unzipped, err := io.ReadAll(zip)
			if err != nil || !bytes.Equal(plain, unzipped) || zipped.Body.Len() > 0 {
				t.Fatalf("%s as %s: %v, %d bytes and %d, %d more", path, accept, err, len(plain), len(unzipped),
					zipped.Body.Len())
			}
			if doc == nil {
				doc = plain
				continue
			}
			var got, want proto.Message
			if strings.Contains(path, "v3") {
				got = &openapi_v3.Document{}
				want, err = openapi_v3.ParseDocument(doc)
			} else {
				got = &openapi_v2.Document{}
				want, err = openapi_v2.ParseDocument(doc)
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := proto.Unmarshal(plain, got); err != nil || !proto.Equal(got, want) {
				t.Errorf("%s in protobuf is not what its JSON says: %v", path, err)
			}
		}
	}
}

// One more kind costs its own pieces, and what goes is forgotten; the documents of other groups
// stay the same ones.
func TestOneMoreKind(t *testing.T) {
	all := kinds.All()
	s := New(all, "test")
	made := map[string]int{}
	model := func(name string) func(v3 bool) (map[string]any, error) {
		return func(v3 bool) (map[string]any, error) {
			made[fmt.Sprintf("%s v3=%v", name, v3)]++
			return twentyFields(v3)
		}
	}
	documents := func() (tags []string) {
		for _, path := range []string{"/openapi/v2", "/openapi/v3/api/v1", "/openapi/v3/apis/g0.example.com/v1"} {
			tags = append(tags, ask(t, s, path, "application/json").Header().Get("ETag"))
		}
		ask(t, s, "/openapi/v3", "application/json")
		return tags
	}
	for i := range 5 {
		widget(t, all, i, model("old"))
	}
	before := documents()
	pieces, written := len(s.descriptions), s.written.Load()
	more := widget(t, all, 5, model("new"))
	after := documents()
	if made["old v3=false"] != 5 || made["old v3=true"] != 5 || made["new v3=false"] != 1 || made["new v3=true"] != 1 {
		t.Errorf("models were made: %v", made)
	}
	if after[0] == before[0] || !slices.Equal(after[1:], before[1:]) {
		t.Errorf("documents were %v, and are %v", before, after)
	}
	if n := s.written.Load() - written; n <= 0 || n > 150<<10 {
		t.Errorf("one more kind had %d bytes written", n)
	}
	if err := all.Drop(more); err != nil {
		t.Fatal(err)
	}
	if now := documents(); !slices.Equal(now, before) {
		t.Errorf("documents were %v, and are %v", before, now)
	}
	if len(s.descriptions) != pieces || len(s.index) != 1 {
		t.Errorf("%d pieces are kept, %d indexes; it were %d", len(s.descriptions), len(s.index), pieces)
	}
}

// While a document takes its time, others that are made are answered, and so is what does not need
// it; a change of the kinds meanwhile is in what is asked for after it.
func TestSlowMaking(t *testing.T) {
	all := kinds.All()
	s := New(all, "test")
	ask(t, s, "/openapi/v3/apis/apps/v1", "application/json")
	begun, on := make(chan struct{}), make(chan struct{})
	var first sync.Once
	slow := widget(t, all, 0, func(v3 bool) (map[string]any, error) {
		first.Do(func() { close(begun) })
		<-on
		return twentyFields(v3)
	})
	var waiting sync.WaitGroup
	for range 4 {
		waiting.Go(func() {
			if w := ask(t, s, "/openapi/v2", "application/json"); w.Code != 200 ||
				!strings.Contains(w.Body.String(), "Widget0") {
				t.Errorf("%d, without the kind that it was asked for with", w.Code)
			}
		})
	}
	<-begun
	ask(t, s, "/openapi/v3/apis/apps/v1", "application/json")
	widget(t, all, 1, twentyFields)
	ask(t, s, "/openapi/v3/apis/g1.example.com/v1", "application/json")
	if err := all.Drop(slow); err != nil {
		t.Fatal(err)
	}
	if w := ask(t, s, "/openapi/v2", "application/json"); strings.Contains(w.Body.String(), "Widget0") ||
		!strings.Contains(w.Body.String(), "Widget1") {
		t.Error("a document is of kinds that are no longer there")
	}
	close(on)
	waiting.Wait()
	if w := ask(t, s, "/openapi/v2", "application/json"); strings.Contains(w.Body.String(), "Widget0") {
		t.Error("what was made late has taken the place of what is true now")
	}
}

// A schema that fails to be made is told, and tried again.
func TestMakingThatFails(t *testing.T) {
	all := kinds.All()
	s := New(all, "test")
	fails := true
	widget(t, all, 0, func(v3 bool) (map[string]any, error) {
		if fails {
			return object{"type": func() {}}, nil
		}
		return twentyFields(v3)
	})
	const path = "/openapi/v3/apis/g0.example.com/v1"
	if w := ask(t, s, path, "application/json"); w.Code != 500 || !strings.Contains(w.Body.String(), "Widget0") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	fails = false
	if w := ask(t, s, path, "application/json"); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// BenchmarkManyKinds makes documents among 300 kinds that bring their schemas.
func BenchmarkManyKinds(b *testing.B) {
	part, err := NewPart([]byte(other), wardle)
	if err != nil {
		b.Fatal(err)
	}
	for _, x := range []struct{ path, accept string }{
		{"/openapi/v2", "application/json"}, {"/openapi/v2 merged", "application/json"}, {"/openapi/v2", protoV2[0]},
		{"/openapi/v3", "application/json"},
	} {
		path, merged := strings.CutSuffix(x.path, " merged")
		get := func(s *Spec) {
			r := httptest.NewRequest("GET", path, nil)
			r.Header.Set("Accept", x.accept)
			r.Header.Set("Accept-Encoding", "gzip")
			w := httptest.NewRecorder()
			if merged {
				s.ServeMerged(w, r, []*Part{part})
			} else {
				s.Serve(w, r)
			}
			if w.Code != 200 {
				b.Fatal(w.Code)
			}
		}
		for _, again := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s %s again=%v", x.path, x.accept, again), func(b *testing.B) {
				b.ReportAllocs()
				for range b.N {
					b.StopTimer()
					all := kinds.All()
					for i := range 300 {
						widget(b, all, i, twentyFields)
					}
					s := New(all, "test")
					if again {
						get(s)
						widget(b, all, 300, twentyFields)
					}
					b.StartTimer()
					get(s)
				}
			})
		}
	}
}
