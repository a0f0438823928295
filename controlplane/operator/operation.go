package operator

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
)

// operation is a change of the cluster that a user requested. It is logged as one message: user,
// verb, object and outcome.
type operation struct {
	verb, object string
	failure      string // reason of a failure that the response does not contain
	attributes   []any  // other attributes of the log message
}

// logOperation returns a handler that calls serve, and logs each request except GET, HEAD and
// OPTIONS. verb is the command's name in the log.
func (v *API) logOperation(verb string, serve func(http.ResponseWriter, *http.Request, *operation)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		o := &operation{verb: verb}
		switch req.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
			serve(w, req, o)
			return
		}
		started := time.Now()
		answer := &responseRecorder{ResponseWriter: w}
		defer func() {
			if !isLoggedElsewhere(req) {
				o.logOutcome(v.config.Log, api.CallerOf(req.Context()), answer, time.Since(started))
			}
		}()
		serve(answer, req, o)
	})
}

// isLoggedElsewhere reports whether another replica has forwarded the request and logs it. It
// ignores the header clusterhttp.HeaderRecorded of a request that was not sent by a replica.
func isLoggedElsewhere(req *http.Request) bool {
	c := api.CallerOf(req.Context())
	return req.Header.Get(clusterhttp.HeaderRecorded) != "" && c.User.Name == c.Sender.Name &&
		strings.HasPrefix(c.Sender.Name, clusterhttp.ReplicaUserPrefix)
}

// logOutcome logs an operation after its response: the user of the caller c, the outcome, and the
// duration (took).
func (o *operation) logOutcome(log *slog.Logger, c api.Caller, answer *responseRecorder, took time.Duration) {
	attrs := []any{"user", c.User.Name, "verb", o.verb, "object", o.object}
	if c.Sender.Name != c.User.Name {
		attrs = append(attrs, "sender", c.Sender.Name)
	}
	level, outcome, reason := slog.LevelInfo, "done", o.failure
	if reason == "" {
		reason = answer.refusalReason()
	}
	switch {
	case o.failure != "" || answer.code >= http.StatusInternalServerError:
		level, outcome = slog.LevelWarn, "failed"
	case answer.code >= http.StatusBadRequest:
		level, outcome = slog.LevelWarn, "refused"
	}
	if answer.code == http.StatusNotFound && c.User.Name == clusterhttp.ReplicaUserPrefix+o.object {
		level = slog.LevelInfo // this is how a joining replica checks that it is not a member
	}
	attrs = append(attrs, "outcome", outcome)
	if outcome != "done" {
		attrs = append(attrs, "reason", reason)
	}
	log.Log(context.Background(), level, "cluster verb",
		append(append(attrs, o.attributes...), "took", took.Round(time.Millisecond))...)
}

// responseRecorder records the status code of a response, and the body of an error response.
type responseRecorder struct {
	http.ResponseWriter
	code int
	body bytes.Buffer
}

// maxRecordedBody is the maximum size of the body that a responseRecorder records, in bytes.
const maxRecordedBody = 8 << 10

// WriteHeader implements http.ResponseWriter.
func (a *responseRecorder) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
	a.ResponseWriter.WriteHeader(code)
}

// Write implements http.ResponseWriter.
func (a *responseRecorder) Write(p []byte) (int, error) {
	if a.code == 0 {
		a.code = http.StatusOK
	}
	if a.code >= http.StatusBadRequest {
		a.body.Write(p[:min(len(p), maxRecordedBody-a.body.Len())])
	}
	return a.ResponseWriter.Write(p)
}

// Unwrap is called by http.ResponseController.
func (a *responseRecorder) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// refusalReason returns the message of a recorded error response.
func (a *responseRecorder) refusalReason() string {
	var s metav1.Status
	if json.Unmarshal(a.body.Bytes(), &s) == nil && s.Message != "" {
		return s.Message
	}
	return http.StatusText(a.code)
}
