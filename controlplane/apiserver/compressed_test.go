package apiserver

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// compressedFrom is the size from which objects and lists are compressed, as in Kubernetes.
const compressedFrom = 128 << 10

// Whoever takes gzip gets the same bytes as whoever does not, once they are unpacked: objects and lists from a size on,
// in every form, what the server tells of itself always. Vary says what a cache must tell apart. Who takes no gzip, or
// weighs it with nothing, gets none.
func TestAnswersAreTheSameCompressed(t *testing.T) {
	now := time.Now()
	r := start(t, func(c *Config) { c.Clock = func() time.Time { return now } }) // tables tell of ages
	c := r.adminHTTP()
	for i := range 3 {
		r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("c", i)},
			Data: map[string]string{"k": strings.Repeat("word ", 20_000)}})
	}
	const maps, table = "/api/v1/namespaces/default/configmaps", "application/json;as=Table;v=v1;g=meta.k8s.io"
	const proto, aggregated = "application/vnd.kubernetes.protobuf", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "large"},
		Data: map[string]string{"k": strings.Repeat("word ", 40_000)}})
	for _, q := range []struct {
		path, accept string
		always       bool // compressed whatever its size
	}{
		{maps, "application/json", false}, {maps, "application/yaml", false}, {maps, proto, false},
		{maps, table, true}, // what is shown of large objects is written as it is made
		{maps + "?includeObject=Object", table, false}, {maps + "?limit=1", "application/json", false},
		{maps + "/c0", "application/json", false}, {maps + "/large", "application/json", false}, {maps + "/large", proto, false},
		{maps + "/large?pretty=true", "application/json", false}, {maps + "/no-such", "application/json", false},
		{"/api/v1/namespaces", "application/json", false}, {"/apis", "application/json", false}, {"/apis", aggregated, false},
		{"/api", aggregated, false}, {"/api/v1", "application/json", false}, {"/version", "application/json", false},
		{"/openapi/v2", "application/json", true}, {"/openapi/v3", "application/json", false},
		{"/openapi/v3/api/v1", "application/json", true}, {"/metrics", "text/plain", true},
	} {
		plain := r.call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "identity")
		none := r.call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "gzip;q=0, deflate")
		zipped := r.call(c, "GET", q.path, "", "Accept", q.accept, "Accept-Encoding", "deflate, gzip;q=0.5")
		name := q.path + " as " + q.accept
		if plain.header.Get("Content-Encoding")+none.header.Get("Content-Encoding") != "" {
			t.Errorf("%s: who takes no gzip gets %v and %v", name, plain.header, none.header)
			continue
		}
		if packed := zipped.header.Get("Content-Encoding") == "gzip"; packed != (q.always || len(plain.body) >= compressedFrom) {
			t.Errorf("%s: %d bytes are compressed: %v", name, len(plain.body), packed)
		} else if packed {
			if varies := zipped.header.Values("Vary"); q.path != "/metrics" && !slices.Contains(varies, "Accept-Encoding") {
				t.Errorf("%s: Vary is %q", name, varies)
			}
			zipped.body = unpacked(t, zipped.body)
		}
		if q.path == "/metrics" { // they go on
			plain.body, zipped.body, none.body = families(plain.body), families(zipped.body), families(none.body)
		}
		if zipped.code != plain.code || zipped.body != plain.body || none.body != plain.body {
			t.Errorf("%s: %d and %d bytes, %d compressed", name, len(plain.body), len(none.body), len(zipped.body))
		}
		if zipped.header.Get("Content-Type") != plain.header.Get("Content-Type") || zipped.header.Get("ETag") != plain.header.Get("ETag") {
			t.Errorf("%s: %v and %v", name, plain.header, zipped.header)
		}
	}
}

// A watch is not compressed: its events would wait in the buffer.
func TestWatchesAreNotCompressed(t *testing.T) {
	r := start(t, nil)
	r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "large"},
		Data: map[string]string{"k": strings.Repeat("word ", 40_000)}})
	req, err := http.NewRequestWithContext(within(t), "GET", "https://"+r.addr+
		"/api/v1/namespaces/default/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := r.adminHTTP().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	begins := make([]byte, len(`{"type":"ADDED"`))
	if _, err := io.ReadFull(resp.Body, begins); err != nil || string(begins) != `{"type":"ADDED"` || resp.Header.Get("Content-Encoding") != "" {
		t.Errorf("%v: %q, %v", err, begins, resp.Header)
	}
}

func unpacked(t *testing.T, body string) string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(zip)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// families returns the lines of metrics that describe the metric families.
func families(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
