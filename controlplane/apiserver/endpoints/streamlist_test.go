package endpoints

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// encoding is a Backend that encodes objects and reports when it does.
type encoding struct {
	Backend
	proto   *protobuf.Serializer
	encoded func()
}

func (e encoding) Encoded(obj runtime.Object, media string) ([]byte, error) {
	if e.encoded != nil {
		e.encoded()
	}
	if media == mediaProto {
		return runtime.Encode(e.proto, obj)
	}
	return json.Marshal(obj)
}

func newEncoding() encoding {
	s := api.Scheme()
	return encoding{proto: protobuf.NewSerializer(s, s)}
}

// many returns a list of n config maps of a size, and the request for it.
func many(n, size int) (*api.ObjectList, *api.Request) {
	k := kinds.All().ByType(&corev1.ConfigMap{})
	l := &api.ObjectList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "next"}, Bytes: int64(n * size)}
	l.SetGroupVersionKind(k.ListGVK())
	for i := range n {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("c%d", i)},
			Data: map[string]string{"k": strings.Repeat("é", size/2)}}
		k.SetTypeMeta(cm)
		l.Items = append(l.Items, cm)
	}
	return l, &api.Request{Verb: api.VerbList, Kind: k}
}

// A streamed list has the bytes of one that is put together first, in every format.
func TestStreamedListIsTheSame(t *testing.T) {
	const table = ";as=Table;g=meta.k8s.io;v=v1"
	const partials = ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	clock := func() time.Time { return time.Unix(1e9, 0) }
	h := New(Config{Backend: newEncoding(), Kinds: kinds.All(), Scheme: api.Scheme(), Clock: clock})
	for _, n := range []int{0, 1, 5} {
		for _, accept := range []string{mediaJSON, mediaProto, mediaJSON + table, mediaJSON + partials,
			mediaProto + partials, mediaYAML,
			mediaYAML + table, mediaYAML + partials} {
			for _, query := range []string{"", "?pretty=true"} {
				for _, zipped := range []bool{false, true} {
					get := func(bytes int64) *httptest.ResponseRecorder {
						l, req := many(n, 1000)
						l.Bytes = bytes
						r := httptest.NewRequest("GET", "/api/v1/configmaps"+query, nil)
						r.Header.Set("Accept", accept)
						if zipped {
							r.Header.Set("Accept-Encoding", "gzip")
						}
						f, err := Negotiate(r)
						if err != nil {
							t.Fatal(err)
						}
						w := httptest.NewRecorder()
						h.writeResponse(t.Context(), w, r, req, f, http.StatusOK, l)
						return w
					}
					whole, streamed := get(0), get(streamThreshold)
					a, b := unzipped(t, whole), unzipped(t, streamed)
					// The serializer of Kubernetes ends an envelope with two empty fields.
					a = bytes.TrimSuffix(a, []byte("\x1a\x00\"\x00"))
					if !bytes.Equal(bytes.TrimSpace(a),
						bytes.TrimSuffix(bytes.TrimSpace(b), []byte("\x1a\x00\"\x00"))) {
						t.Errorf("%d items, %s%s: streamed\n%q\nwhole\n%q", n, accept, query, b, a)
					}
					if whole.Header().Get("Content-Type") != streamed.Header().Get("Content-Type") {
						t.Errorf("%s: the streamed one is %s", accept, streamed.Header().Get("Content-Type"))
					}
				}
			}
		}
	}
}

func unzipped(t *testing.T, w *httptest.ResponseRecorder) []byte {
	t.Helper()
	if w.Header().Get("Content-Encoding") != "gzip" {
		return w.Body.Bytes()
	}
	z, err := gzip.NewReader(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// counting is a writer that counts the written bytes.
type counting struct {
	*httptest.ResponseRecorder
	n int
}

func (c *counting) Write(p []byte) (int, error) {
	c.n += len(p)
	return len(p), nil
}

// No item is encoded before the ones in front of it have gone out, and none is held afterwards.
func TestListIsStreamed(t *testing.T) {
	for _, accept := range []string{mediaJSON, mediaProto, mediaYAML} {
		l, req := many(50, 100<<10)
		w := &counting{ResponseRecorder: httptest.NewRecorder()}
		backend, calls := newEncoding(), 0
		backend.encoded = func() {
			if before := (calls - 1) * 100 << 10; w.n < before {
				t.Errorf("%s: item %d is encoded when %d bytes have gone out", accept, calls, w.n)
			}
			if calls > 1 && l.Items[calls-2] != nil {
				t.Errorf("%s: item %d is held", accept, calls-2)
			}
			calls++
		}
		h := New(Config{Backend: backend, Kinds: kinds.All(), Scheme: api.Scheme()})
		r := httptest.NewRequest("GET", "/api/v1/configmaps", nil)
		h.writeResponse(t.Context(), w, r, req, Format{Media: accept}, http.StatusOK, l)
		if calls != 50 || w.n < 5000<<10 {
			t.Errorf("%s: %d items, %d bytes", accept, calls, w.n)
		}
	}
}

// Watch frames are those of Kubernetes, for small and for large objects, and no room is kept for
// the large.
func TestWatchFrames(t *testing.T) {
	for _, size := range []int{10, 3 * batchBytes} {
		object := []byte(`"` + strings.Repeat("x", size) + `"`)
		for _, media := range []string{mediaJSON, mediaProto} {
			var out bytes.Buffer
			s := &eventStream{format: Format{Media: media}, w: &out, metrics: noWatchMetrics{}}
			s.addFrame(watch.Modified, object)
			s.addFrame(watch.Deleted, object)
			s.writeBuffered()
			want := &bytes.Buffer{}
			for _, kind := range []string{"MODIFIED", "DELETED"} {
				if media == mediaJSON {
					fmt.Fprintf(want, "{\"type\":%q,\"object\":%s}\n", kind, object)
					continue
				}
				ev := metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: object}}
				data, err := ev.Marshal()
				if err != nil {
					t.Fatal(err)
				}
				want.Write(binary.BigEndian.AppendUint32(nil, uint32(len(data))))
				want.Write(data)
			}
			if !bytes.Equal(out.Bytes(), want.Bytes()) {
				t.Errorf("%s of %d bytes: %.80q, want %.80q", media, size, out.Bytes(), want.Bytes())
			}
			if s.buf.Cap() > 2*batchBytes {
				t.Errorf("%s: room for %d bytes is kept", media, s.buf.Cap())
			}
		}
	}
}
