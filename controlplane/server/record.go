package server

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// deed is one verb of the cluster that somebody asked for. It becomes one line of
// the log: who, what, of what, and what became of it.
type deed struct {
	verb, object string
	failure      string // why, when the answer does not say it
	more         []any  // further attributes
}

// changes are the methods that are logged; the others look only.
func changes(method string) bool {
	return method != http.MethodGet && method != http.MethodHead && method != http.MethodOptions
}

// recorded serves a verb and logs it.
func (r *Replica) recorded(verb string, serve func(http.ResponseWriter, *http.Request, *deed)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		d := &deed{verb: verb}
		if !changes(req.Method) {
			serve(w, req, d)
			return
		}
		began := time.Now()
		out := &overheardWriter{ResponseWriter: w}
		defer func() {
			if !recordedElsewhere(req) {
				d.log(r.log, api.CallerOf(req.Context()), out, time.Since(began))
			}
		}()
		serve(out, req, d)
	}
}

// recordedElsewhere says that another replica hands the request on, and logs whose
// it is. Nobody but a replica is believed that.
func recordedElsewhere(req *http.Request) bool {
	c := api.CallerOf(req.Context())
	return req.Header.Get(headerRecorded) != "" && c.User.Name == c.Sender.Name && strings.HasPrefix(c.Sender.Name, replicaUser)
}

// log writes the line of a deed that has been answered.
func (d *deed) log(log *slog.Logger, c api.Caller, answer *overheardWriter, took time.Duration) {
	attrs := []any{"user", c.User.Name, "verb", d.verb, "object", d.object}
	if c.Sender.Name != c.User.Name {
		attrs = append(attrs, "sender", c.Sender.Name)
	}
	level, outcome, reason := slog.LevelInfo, "done", d.failure
	if reason == "" {
		reason = answer.reason()
	}
	switch {
	case d.failure != "" || answer.code >= http.StatusInternalServerError:
		level, outcome = slog.LevelWarn, "failed"
	case answer.code >= http.StatusBadRequest:
		level, outcome = slog.LevelWarn, "refused"
	}
	if answer.code == http.StatusNotFound && c.User.Name == replicaUser+d.object {
		level = slog.LevelInfo // a newcomer makes sure that nobody knows it
	}
	attrs = append(attrs, "outcome", outcome)
	if outcome != "done" {
		attrs = append(attrs, "reason", reason)
	}
	log.Log(context.Background(), level, "cluster verb", append(append(attrs, d.more...), "took", took.Round(time.Millisecond))...)
}

// overheardWriter remembers the code of an answer and, of a refusal, what it says.
type overheardWriter struct {
	http.ResponseWriter
	code int
	said bytes.Buffer
}

// maxSaid bounds what is kept of a refusal.
const maxSaid = 8 << 10

// WriteHeader implements http.ResponseWriter.
func (w *overheardWriter) WriteHeader(code int) {
	if w.code == 0 {
		w.code = code
	}
	w.ResponseWriter.WriteHeader(code)
}

// Write implements http.ResponseWriter.
func (w *overheardWriter) Write(p []byte) (int, error) {
	if w.code == 0 {
		w.code = http.StatusOK
	}
	if w.code >= http.StatusBadRequest {
		w.said.Write(p[:min(len(p), maxSaid-w.said.Len())])
	}
	return w.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (w *overheardWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// reason is the message of a refusal.
func (w *overheardWriter) reason() string {
	var s metav1.Status
	if json.Unmarshal(w.said.Bytes(), &s) == nil && s.Message != "" {
		return s.Message
	}
	return http.StatusText(w.code)
}
