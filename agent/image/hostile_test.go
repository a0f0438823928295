package image

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
)

// A registry cannot make the node read an unbounded manifest or config. F106
func TestRegistryThatDoesNotEnd(t *testing.T) {
	const endless = 256 << 20
	for _, c := range []struct{ name, manifest string }{
		{"manifest", ""},
		{"config of unknown size",
			`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","layers":[],
			"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":-1,"digest":"sha256:` +
				strings.Repeat("0", 64) + `"}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				switch {
				case q.URL.Path == "/v2/":
				case strings.Contains(q.URL.Path, "/manifests/") && c.manifest != "":
					w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
					fmt.Fprint(w, c.manifest)
				case strings.Contains(q.URL.Path, "/manifests/") && !strings.Contains(q.URL.RawQuery, "moved"):
					http.Redirect(w, q, "/elsewhere", http.StatusTemporaryRedirect)
				default:
					w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
					chunk := bytes.Repeat([]byte(" "), 1<<20)
					for sent := 0; sent < endless; sent += len(chunk) {
						if _, err := w.Write(chunk); err != nil {
							return
						}
					}
				}
			}))
			defer srv.Close()
			host := strings.TrimPrefix(srv.URL, "http://")
			s, stop := openStore(t, Config{Insecure: []string{host}})
			defer stop()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := pullImage(t, s, host+"/app:v1", nil)
			runtime.ReadMemStats(&after)
			if !errors.Is(err, errLimit) {
				t.Errorf("pull: %v", err)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
				t.Errorf("%d MiB were allocated for it", took>>20)
			}
		})
	}
}
