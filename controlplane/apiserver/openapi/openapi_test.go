package openapi

import (
	"net/http/httptest"
	"testing"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// BenchmarkDocuments makes every document anew, as the first client after a start causes.
func BenchmarkDocuments(b *testing.B) {
	for _, x := range []struct{ path, accept string }{
		{"/openapi/v2", "application/json"}, {"/openapi/v2", protoV2[0]}, {"/openapi/v3", "application/json"},
	} {
		b.Run(x.path+" "+x.accept, func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				s := New(kinds.All(), "test")
				r := httptest.NewRequest("GET", x.path, nil)
				r.Header.Set("Accept", x.accept)
				w := httptest.NewRecorder()
				if !s.Serve(w, r) || w.Code != 200 {
					b.Fatalf("%d %s", w.Code, w.Body)
				}
			}
		})
	}
}
