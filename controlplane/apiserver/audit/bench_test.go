package audit

import (
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// BenchmarkRecord measures the cost of a record: for a write, for a successful read, and for a
// write that is not recorded.
func BenchmarkRecord(b *testing.B) {
	u := api.User{Name: "system:node:w1", Groups: []string{api.GroupNodes, api.GroupAuthenticated}}
	write := Attributes{User: u, Sender: u, Verb: "update", Resource: "pods", Subresource: "status",
		Namespace: "default", Name: "web-7d4b9c6f5-x2x8z", Version: "v1", Changes: true}
	read := write
	read.Verb, read.Changes = "get", false
	for name, at := range map[string]Attributes{"write": write, "read": read} {
		b.Run(name, func(b *testing.B) {
			l := NewLog(io.Discard, true, slog.New(slog.DiscardHandler))
			a := New(Default(), l, time.Now)
			b.ReportAllocs()
			for b.Loop() {
				_, r := a.Begin(b.Context(), Origin{URI: "/api/v1/namespaces/default/pods/web-7d4b9c6f5-x2x8z/status",
					Source: "192.0.2.1", Received: time.Now()})
				_ = r.SetRequest(at)
				r.Finish(http.StatusOK, false)
			}
		})
	}
}
